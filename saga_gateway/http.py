"""uvicorn's HTTP protocol with a bound on what a client may send before its request begins."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
)
_BODY = (
    b'{"error":{"message":"the request line and headers are larger than %d bytes (max_head_bytes)",'
    b'"type":"invalid_request_error","code":"head_too_large"}}'
)


class BoundedHttp(HttpToolsProtocol):
    """httptools keeps a header until it is complete, however long that is.

    Attributes:
        max_head_bytes: of the request line and the headers together.
    """

    max_head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._saga_head_bytes: int | None = 0

    def data_received(self, data: bytes) -> None:
        if self._saga_head_bytes is not None:
            self._saga_head_bytes += len(data)
        super().data_received(data)
        head_bytes = self._saga_head_bytes
        is_too_large = head_bytes is not None and head_bytes > self.max_head_bytes
        if is_too_large and not self.transport.is_closing():
            body = _BODY % self.max_head_bytes
            self.transport.write(_TOO_LARGE % (len(body), body))
            self.transport.close()

    def on_headers_complete(self) -> None:
        self._saga_head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._saga_head_bytes = 0
        super().on_message_complete()


def bounded(max_head_bytes: int) -> type[HttpToolsProtocol]:
    """The protocol with that bound; 0: without one."""
    if not max_head_bytes:
        return HttpToolsProtocol
    return type("BoundedHttp", (BoundedHttp,), {"max_head_bytes": max_head_bytes})
