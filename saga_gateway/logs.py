"""The gateway's log: one line an event, as text or as JSON."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import orjson

FORMATS = ("text", "json")


class JsonFormatter(logging.Formatter):
    """One JSON object a line. What is given as ``extra={"fields": {...}}`` stands beside."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class TextFormatter(logging.Formatter):
    """A line for people; fields stand behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        text = super().format(record)
        return text if not fields else f"{text} {' '.join(f'{k}={v}' for k, v in fields.items())}"


def set_up(log_format: str, *, requests: bool) -> None:
    """Write the process's log to stderr; ``requests``: a line for each relayed request too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("saga_gateway.requests").setLevel(
        logging.INFO if requests else logging.WARNING
    )
