"""What a worker's pod does before it is stopped, against a stand-in for vLLM's metrics."""

import importlib.util
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.deploy.rendered import DEPLOY

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {running:.1f}
vllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting:.1f}
vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} 7.0
"""


def load():
    path = DEPLOY / "kustomize/base/workers/drain.py"
    spec = importlib.util.spec_from_file_location("drain", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def serve():
    """A stand-in for vLLM's /metrics, which says one of ``counts`` after the other."""
    servers = []

    def start(*counts):
        left = list(counts)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                running, waiting = left.pop(0) if len(left) > 1 else left[0]
                body = TEXT.format(running=running, waiting=waiting).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/metrics", left

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def test_it_waits_until_nothing_runs_and_nothing_waits(serve):
    url, left = serve((2, 1), (1, 0), (0, 1), (0, 0))
    assert load().wait(url, 0.0, 60.0, every_s=0.001) is True
    assert left == [(0, 0)]


def test_it_does_not_wait_for_ever(serve):
    url, _ = serve((1, 0))
    assert load().wait(url, 0.0, 0.05, every_s=0.001) is False


def test_a_worker_that_is_gone_is_not_waited_for():
    assert load().wait("http://127.0.0.1:9/metrics", 0.0, 60.0) is True
