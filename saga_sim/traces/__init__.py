"""Traces of agents' LLM calls, read from files."""

from saga_sim.traces.model import Call, Trace
from saga_sim.traces.reading import FORMATS, read_trace
from saga_sim.traces.saga_jsonl import write_trace
from saga_sim.traces.source import TraceError

__all__ = ["FORMATS", "Call", "Trace", "TraceError", "read_trace", "write_trace"]
