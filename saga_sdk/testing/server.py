"""The scripted server: HTTP/1.1 on a free port of the loopback interface, in threads."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from saga_core.hints import Hints
from saga_sdk.testing import answers
from saga_sdk.testing.script import (
    Answer,
    Failure,
    Malformed,
    Player,
    Reply,
    Request,
    Script,
    Step,
)

EVENTS_PATH = "/saga/v1/events"
_POLL_S = 0.01


class ScriptedServer:
    """An OpenAI-compatible server that answers from a script; ``with`` starts and ends it.

    It serves ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/responses``, whole and
    streamed, from the script, ``/v1/embeddings`` and ``/v1/models`` without it, and takes what a
    SAGA gateway takes at ``/saga/v1/events``. Any number of clients may use it at once. A request
    that the script has no answer to fails with the reason, and so does the end of the ``with``
    block, unless it ends with an exception anyway.

    Args:
        script: what is answered, see :data:`saga_sdk.testing.Script`.
        model: the name that ``/v1/models`` lists.

    Attributes:
        requests: all requests but those for events, in the order of arrival.
        events: the events that were taken.
        event_requests: the requests that brought them.
        events_status: what is answered there; events are taken only with 202.
        gate: while it is cleared, no request is answered.
        errors: what was wrong with the script; the first is raised at the end.
    """

    def __init__(self, script: Script = "done", *, model: str = "scripted") -> None:
        self.model = model
        self.requests: list[Request] = []
        self.events: list[dict[str, Any]] = []
        self.event_requests: list[Request] = []
        self.events_status = 202
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[Exception] = []
        self._player = Player(script)
        self._changed = threading.Condition()
        self._http = _HttpServer(self)
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(_POLL_S,), name="scripted server", daemon=True
        )

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as ``base_url``."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def hints(self) -> list[Hints]:
        """The hints of every request, in the order of arrival."""
        return [request.hints for request in list(self.requests)]

    def interject(self, *steps: Step) -> None:
        """Answer the next requests, on any route, with ``steps`` before the script goes on."""
        self._player.interject(steps)

    def wait_for_requests(self, count: int = 1, timeout_s: float = 30.0) -> None:
        """Wait until ``count`` requests have arrived; they need not be answered yet.

        Raises:
            TimeoutError: that many did not come.
        """
        self.wait_until(lambda: len(self.requests) >= count, timeout_s)

    def wait_for_events(self, count: int = 1, timeout_s: float = 30.0) -> None:
        """Wait until ``count`` events have been taken.

        Raises:
            TimeoutError: that many did not come.
        """
        self.wait_until(lambda: len(self.events) >= count, timeout_s)

    def wait_until(self, predicate: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait until ``predicate`` holds, which is asked again after each arrival.

        Raises:
            TimeoutError: it does not in ``timeout_s`` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(predicate, timeout_s):
                came = f"{len(self.requests)} requests and events {self.events}"
                raise TimeoutError(f"not in {timeout_s:g} s; there were {came}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._http.stop()
        self._thread.join()
        if exc is None and self.errors:
            raise self.errors[0]

    def _record(self, method: str, path: str, headers: list[tuple[str, str]], body: Any) -> Request:
        is_event = path.endswith(EVENTS_PATH)
        fields = body if isinstance(body, dict) else {}
        with self._changed:
            into = self.event_requests if is_event else self.requests
            request = Request(len(into) + 1, method, path, tuple(headers), fields)
            into.append(request)
            if is_event:
                request.status = self.events_status
                if request.status == 202:
                    self.events += body if isinstance(body, list) else [body]
            self._changed.notify_all()
        return request

    def _answer(self, request: Request) -> Answer | dict[str, Any]:
        """What to answer: from the script, or a body that needs none."""
        path = request.path
        interjected = self._player.interjected()
        if interjected is not None:
            return interjected
        if any(path.endswith(end) for end in answers.GENERATION):
            return self._player.answer(request)
        if path.endswith("/embeddings"):
            return answers.embeddings(request)
        if path.endswith("/models"):
            return answers.models(self.model)
        return Answer(Failure(404, f"a scripted server has no {path}"))


class _HttpServer(ThreadingHTTPServer):
    """Threads per connection; at the end connections are closed and threads joined."""

    daemon_threads = False
    request_queue_size = 256

    def __init__(self, scripted: ScriptedServer) -> None:
        self.scripted = scripted
        self.stopping = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)

    def opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
            if self.stopping.is_set():
                _cut(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)

    def stop(self) -> None:
        self.stopping.set()
        self.shutdown()
        with self._lock:
            for connection in self._connections:
                _cut(connection)
        self.server_close()

    def wait(self, event: threading.Event) -> None:
        """Wait for an event of the test, or for the end of the server."""
        while not event.wait(_POLL_S) and not self.stopping.is_set():
            continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        # A client may leave when it likes.
        if isinstance(error, Exception) and not isinstance(error, ConnectionError):
            self.scripted.errors.append(error)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client was quicker
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _HttpServer

    def setup(self) -> None:
        super().setup()
        self.server.opened(self.connection)

    def finish(self) -> None:
        self.server.closed(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            body = json.loads(data)
        except ValueError:
            self._send(400, {}, b'{"error": {"message": "the body is not JSON"}}')
            return
        self._serve(body)

    def _serve(self, body: Any) -> None:
        scripted, path = self.server.scripted, urlsplit(self.path).path
        request = scripted._record(self.command, path, self.headers.items(), body)
        if path.endswith(EVENTS_PATH):
            self._send(request.status, {}, b"{}")
            return
        self.server.wait(scripted.gate)
        try:
            answer = scripted._answer(request)
        except Exception as error:  # noqa: BLE001 (a script function is the user's code)
            scripted.errors.append(error)
            # A client that tries again would only use up what is left of the script.
            headers = {"x-should-retry": "false"}
            answer = Answer(Failure(500, f"{type(error).__name__}: {error}", None, headers))
        if isinstance(answer, Answer):
            self._play(answer, request)
        else:
            request.status = 200
            self._send(200, {}, json.dumps(answer).encode())

    def _play(self, answer: Answer, request: Request) -> None:
        status, headers, parts = _written(answer.content, request)
        whole = status != 200 or not request.body.get("stream")
        last = 0 if whole else len(parts)
        for number in range(last + 1):
            for after, event in answer.holds:
                if min(after, last) == number:
                    self.server.wait(event)
            is_cut = answer.cut_after is not None and min(answer.cut_after, last) == number
            if is_cut or self.server.stopping.is_set():
                self.close_connection = True
                return
            if number == 0:
                request.status = status
            if whole:
                self._send(status, headers, b"".join(parts))
            elif number == 0:
                self._head(status, {"content-type": "text/event-stream", **headers})
            if not whole:
                # The last chunk is the empty one.
                data = parts[number] if number < last else b""
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self._head(status, {"content-type": "application/json", **headers}, len(data))
        self.wfile.write(data)

    def _head(self, status: int, headers: Mapping[str, str], length: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is None:
            self.send_header("transfer-encoding", "chunked")
        else:
            self.send_header("content-length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return None


def _written(
    content: Reply | Failure | Malformed, request: Request
) -> tuple[int, dict[str, str], list[bytes]]:
    """Status, headers and the body, in parts when it is a stream."""
    is_stream = bool(request.body.get("stream"))
    if isinstance(content, Failure):
        error = {"message": content.message, "type": "scripted", "param": None, "code": None}
        headers = dict(content.headers)
        if content.retry_after_s is not None:
            headers["retry-after"] = str(round(content.retry_after_s))
            headers["retry-after-ms"] = f"{content.retry_after_s * 1000:g}"
        return content.status, headers, [json.dumps({"error": error}).encode()]
    if isinstance(content, Malformed):
        text = f"data: {content.content}\n\n" if is_stream else content.content
        return 200, {}, [text.encode()]
    whole, stream = next(
        (forms for end, forms in answers.GENERATION.items() if request.path.endswith(end)),
        (answers.chat, answers.chat_stream),
    )
    said = answers.Said(content, request)
    return 200, {}, list(stream(said)) if is_stream else [json.dumps(whole(said)).encode()]
