"""A stand-in for an OpenAI-compatible server or gateway: records requests, answers from a plan.

The plan stands in the last user message: ``read_file > run_python+fetch_url`` means one call of
``read_file``, then two parallel calls, then the answer ``done: <user message>``. The server keeps
no state between requests, so any number of agents can use it at once.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from saga_core.hints import Hints, decode


@dataclass(frozen=True)
class Recorded:
    """One request as it arrived."""

    path: str
    headers: list[tuple[str, str]]
    body: dict[str, Any]
    status: int

    @property
    def hints(self) -> Hints:
        decoded = decode(self.headers)
        assert decoded.dropped == ()
        return decoded.hints

    def get(self, name: str) -> str | None:
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)

    @property
    def saga_headers(self) -> dict[str, str]:
        return {n.lower(): v for n, v in self.headers if n.lower().startswith("x-saga-")}

    @property
    def user_text(self) -> str:
        return [m["content"] for m in self.body["messages"] if m["role"] == "user"][-1]


class StandInOpenAI:
    """The server, in threads of this process; ``with`` starts and ends it.

    Attributes:
        events: taken at the gateway's route; ``event_posts`` counts the requests for it.
        events_status: what that route answers; events are recorded only with 202.
    """

    def __init__(self) -> None:
        self.requests: list[Recorded] = []
        self.events: list[dict[str, Any]] = []
        self.event_posts = 0
        self.events_status = 202
        self.failures_left = 0
        self.fail_status = 500
        self.arrived = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler_class())
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def hints(self) -> list[Hints]:
        return [request.hints for request in self.requests]

    def __enter__(self) -> StandInOpenAI:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def record(self, path: str, headers: list[tuple[str, str]], body: dict[str, Any]) -> int:
        with self._lock:
            failing = self.failures_left > 0
            self.failures_left -= failing
            status = self.fail_status if failing else 200
            self.requests.append(Recorded(path, headers, body, status))
        self.arrived.set()
        self.gate.wait()
        return status

    def take_events(self, events: list[dict[str, Any]]) -> int:
        with self._lock:
            self.event_posts += 1
            if self.events_status == 202:
                self.events += events
            return self.events_status

    def _handler_class(self) -> type[BaseHTTPRequestHandler]:
        standin = self

        class Handler(BaseHTTPRequestHandler):
            # HTTP/1.0: each connection ends with its response, so nothing stays open.
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path.endswith("/saga/v1/events"):
                    self.reply({}, standin.take_events(body))
                    return
                status = standin.record(self.path, list(self.headers.items()), body)
                if status != 200:
                    self.reply({"error": {"message": "scripted failure"}}, status)
                elif self.path.endswith("/embeddings"):
                    self.reply(_EMBEDDINGS)
                elif body.get("stream"):
                    self.reply_stream(_message(body))
                else:
                    self.reply(_completion(_message(body)))

            def reply(self, answer: dict[str, Any], status: int = 200) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.send_header("retry-after-ms", "1")
                self.send_header("location", "/elsewhere")
                self.end_headers()
                self.write(data)

            def reply_stream(self, message: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for chunk in _chunks(message):
                    self.write(f"data: {json.dumps(chunk)}\n\n".encode())
                self.write(b"data: [DONE]\n\n")

            def write(self, data: bytes) -> None:
                try:
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client has left

            def log_message(self, format: str, *args: object) -> None:
                return None

        return Handler


_EMBEDDINGS = {
    "object": "list",
    "model": "standin",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.0]}],
    "usage": {"prompt_tokens": 1, "total_tokens": 1},
}


def _message(body: dict[str, Any]) -> dict[str, Any]:
    messages = body["messages"]
    last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
    plan = messages[last_user]["content"]
    done = sum(1 for m in messages[last_user:] if m["role"] == "assistant")
    rounds = [r.strip() for r in plan.partition("#")[0].split(">") if r.strip()]
    if done >= len(rounds) or not body.get("tools"):
        return {"role": "assistant", "content": f"done: {plan}"}
    tool_calls = [
        {
            "id": f"call_{done}_{index}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"text": "x"})},
        }
        for index, name in enumerate(rounds[done].split("+"))
    ]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def _completion(message: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "chatcmpl-standin",
        "object": "chat.completion",
        "created": 0,
        "model": "standin",
        "choices": [{"index": 0, "message": message, "finish_reason": _finish(message)}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _chunks(message: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls", []))]
    words = (message["content"] or "").split(" ")
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"tool_calls": calls}] if calls else [{"content": w + " "} for w in words]
    choices = [{"index": 0, "delta": d, "finish_reason": None} for d in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": _finish(message)})
    return [
        {
            "id": "chatcmpl-standin",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "standin",
            "choices": [choice],
        }
        for choice in choices
    ]


def _finish(message: dict[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"
