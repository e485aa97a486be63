"""Wait until vLLM serves nothing any more: what a worker's pod does before it is stopped.

The gateway has heard by then that the pod goes, and sends nothing new; what is open ends here. The
wait is over at last after LONGEST_S, whatever is open.
"""

import re
import sys
import time
import urllib.request

METRICS = "http://127.0.0.1:8000/metrics"
OPEN = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", re.MULTILINE)


def open_requests(url: str) -> float:
    """Requests that vLLM runs or lets wait; 0 when it does not say."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return sum(float(count) for count in OPEN.findall(answer.read().decode()))
    except OSError:
        return 0.0  # It is gone, or does not answer: there is nothing to wait for.


def wait(url: str, least_s: float, longest_s: float, every_s: float = 1.0) -> bool:
    """Wait, and say whether nothing was open at the end."""
    began_s = time.monotonic()
    time.sleep(least_s)
    while open_requests(url) > 0:
        if time.monotonic() - began_s >= longest_s:
            return False
        time.sleep(every_s)
    return True


if __name__ == "__main__":
    wait(METRICS, float(sys.argv[1]), float(sys.argv[2]))
