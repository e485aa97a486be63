"""One HTTP POST with the standard library alone."""

from __future__ import annotations

import functools
import ssl
import urllib.request
from http.client import HTTPException
from typing import Any


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Passes every response on: a redirect is not followed, an error status does not raise."""

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


def post_json(url: str, body: bytes, timeout_s: float, authorization: str | None = None) -> int:
    """Send a JSON body and return the status; what is answered is not read.

    The environment's proxies are used, as the OpenAI client uses them.

    Args:
        timeout_s: for the connection, and again for each wait on it.
        authorization: the header of that name; it is not sent when None.

    Raises:
        OSError: there was no answer.
    """
    headers = {"Content-Type": "application/json", "User-Agent": "saga-sdk"}
    if authorization is not None:
        headers["Authorization"] = authorization
    request = urllib.request.Request(url, body, headers, method="POST")
    opener = _opener(request.type == "https")
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return int(response.status)
    except HTTPException as error:
        raise ConnectionError(f"no answer: {error!r}") from error


@functools.cache
def _opener(encrypted: bool) -> urllib.request.OpenerDirector:
    # Reading the certificates takes milliseconds: once, and only where they are needed.
    if not encrypted:
        return urllib.request.build_opener(_AnyStatus)
    context = ssl.create_default_context()
    return urllib.request.build_opener(_AnyStatus, urllib.request.HTTPSHandler(context=context))
