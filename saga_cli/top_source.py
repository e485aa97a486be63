"""Where `saga top` gets its snapshots: a gateway, over HTTP."""

from __future__ import annotations

import json
import os
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import BaseHandler, HTTPRedirectHandler, ProxyHandler, Request, build_opener

from saga_core.errors import SagaError

_PATH = "/saga/v1/overview"
_QUERY = "?sessions=100&decisions=100"
_TIMEOUT_S = 10.0

Snapshot = dict[str, Any]


class TopError(SagaError):
    """Nothing can be shown; the message says why, and what to do."""


class _NoRedirect(HTTPRedirectHandler):
    """Follows nothing: the key is for the gateway that was named."""

    def redirect_request(self, *_arguments: object, **_named: object) -> None:
        return None


class Source:
    """A gateway that is asked for its snapshot.

    Args:
        key_env: name of the variable that holds an operator's key, if there is one.

    Raises:
        TopError: the URL is not one of HTTP.
    """

    def __init__(self, url: str, key_env: str) -> None:
        self.url = (url if "://" in url else f"http://{url}").rstrip("/")
        try:
            parts = urlsplit(self.url)
            is_legal = parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:
            is_legal = False
        if not is_legal:
            raise TopError(f"URL {url!r} must be like http://127.0.0.1:8800")
        handlers: list[BaseHandler] = [_NoRedirect()]
        if parts.hostname in ("localhost", "127.0.0.1", "::1"):
            handlers.append(ProxyHandler({}))  # No proxy has a way back to this host.
        self._opener = build_opener(*handlers)
        self._key_env = key_env
        self._key = os.environ.get(key_env, "").strip()

    def snapshot(self) -> Snapshot:
        """What the gateway says now.

        Raises:
            TopError: it says nothing, or not to us.
        """
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            request = Request(self.url + _PATH + _QUERY, headers=headers)
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                body = answer.read()
        except HTTPError as error:
            with error:
                raise TopError(self._refused(error.code)) from None
        except (URLError, HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or error
            advice = "start `saga gateway`, or name its URL"
            raise TopError(f"no gateway answers at {self.url} ({reason}): {advice}") from None
        except ValueError:  # Of the header: it is not sent at all.
            raise TopError(f"what stands in {self._key_env} is no API key") from None
        try:
            shot = json.loads(body)
        except ValueError:
            shot = None
        if not isinstance(shot, dict) or "workers" not in shot:
            raise TopError(f"{self.url} answers, but not as a SAGA gateway does")
        return shot

    def _refused(self, status: int) -> str:
        if status == 401:
            which = f"that in {self._key_env} is not known" if self._key else "there is none"
            return (
                f"{self.url} asks for an operator's API key, and {which}: put it into the "
                f"variable {self._key_env}, or name another one with --key-env"
            )
        if status == 403:
            return (
                f"the API key in {self._key_env} is not an operator's: its entry in the gateway's "
                "file of keys needs admin = true"
            )
        if status == 404:
            return f"{self.url} has no {_PATH}: is it a SAGA gateway?"
        return f"{self.url} answers with HTTP {status}"
