"""The control API as an OpenAPI document: ``python -m gpu_backend.openapi`` prints it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from gpu_backend.kv_retention import Counters, FinishedStep
from gpu_backend.state_feed import MAX_INTERVAL_S, MAX_SESSIONS, MIN_INTERVAL_S, VERSION
from saga_core.hints import MAX_VALUE_CHARS
from saga_core.notices import MAX_NOTICES
from saga_core.notices import VERSION as NOTICE_VERSION

API_VERSION = "1.0.0"
"""Grows by its first number when what a client relies on changes, by its second with additions."""

_MAX_S = 86_400
_BEARER: list[dict[str, list[str]]] = [{"apiKey": []}, {}]


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of this version."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "SAGA worker control API",
            "version": API_VERSION,
            "description": "Served by `saga worker` on vLLM's own HTTP port. Where vLLM asks for "
            "an API key, so does this.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(),
        "components": {
            "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer"}},
            "schemas": {**_notice_schemas(), **_state_schemas(), "Error": _error_schema()},
        },
    }


def _paths() -> dict[str, Any]:
    sessions = _query(
        "sessions", "integer", 0, MAX_SESSIONS, 0, "list so many sessions, those with most tokens"
    )
    steps = _query("steps", "integer", 0, 1, 0, "1: list the latest requests of sessions")
    interval_s = _query(
        "interval_s", "number", MIN_INTERVAL_S, MAX_INTERVAL_S, 1, "seconds between events at most"
    )
    state = {"application/json": {"schema": _ref("State")}}
    return {
        "/saga/v1/sessions:notify": {
            "post": {
                "operationId": "notifySessions",
                "summary": "Tell the worker what sessions wait for",
                "description": "Notices are advice: losing one does no harm. A malformed body is "
                "refused as a whole and changes nothing.",
                "security": _BEARER,
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _ref("NoticeBatch")}},
                },
                "responses": {
                    "200": {"description": "taken; the state after it", "content": state},
                    "413": _failure("the body is too large"),
                    **_failures("the body is malformed; nothing is changed"),
                },
            }
        },
        "/saga/v1/state": {
            "get": {
                "operationId": "getState",
                "summary": "What the worker holds, and its counters",
                "security": _BEARER,
                "parameters": [sessions, steps],
                "responses": {
                    "200": {"description": "the state now", "content": state},
                    **_failures("a parameter is out of its range"),
                },
            }
        },
        "/saga/v1/state:watch": {
            "get": {
                "operationId": "watchState",
                "summary": "The state as a stream, on change and at least every interval_s",
                "description": "Server-sent events: `event: state` with a State as data, and at "
                "the end `event: error` with an Error where the engine no longer answers. A slow "
                "reader misses states in between.",
                "security": _BEARER,
                "parameters": [interval_s, sessions, steps],
                "responses": {
                    "200": {
                        "description": "events, until the client leaves or the server stops",
                        "content": {"text/event-stream": {"schema": {"type": "string"}}},
                    },
                    **_failures("a parameter is out of its range"),
                },
            }
        },
    }


def _notice_schemas() -> dict[str, Any]:
    session_id = {"type": "string", "minLength": 1, "maxLength": MAX_VALUE_CHARS}
    tool_name = {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_VALUE_CHARS}
    seconds = {"type": "number", "minimum": 0, "maximum": _MAX_S}
    median = {"type": ["number", "null"], "minimum": 0, "maximum": _MAX_S}
    share = {"type": "number", "minimum": 0, "maximum": 1}

    def notice(kind: str, text: str, required: list[str], **more: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "description": text,
            "required": ["kind", "session_id", *required],
            "properties": {"kind": {"const": kind}, "session_id": session_id, **more},
        }

    return {
        "NoticeBatch": {
            "type": "object",
            "required": ["version", "notices"],
            "properties": {
                "version": {"const": NOTICE_VERSION},
                "notices": {
                    "type": "array",
                    "maxItems": MAX_NOTICES,
                    "items": {
                        "oneOf": [_ref("PauseNotice"), _ref("ResumeNotice"), _ref("EndNotice")]
                    },
                },
            },
        },
        "PauseNotice": notice(
            "pause",
            "A step has ended and the session waits, for a tool or a person.",
            ["p_reuse", "pause_p95_s"],
            p_reuse={**share, "description": "probability of a next step"},
            pause_p95_s={**seconds, "description": "95th percentile of the pause"},
            pause_p50_s={**median, "description": "its median"},
            tool_name=tool_name,
        ),
        "ResumeNotice": notice(
            "resume_soon",
            "The session's next request is on its way, or expected within in_s seconds.",
            [],
            in_s={**seconds, "default": 0},
        ),
        "EndNotice": notice("end", "The session will not come back.", []),
    }


def _state_schemas() -> dict[str, Any]:
    count = {"type": "integer", "minimum": 0}
    amount = {"type": "number", "minimum": 0}
    counters = {
        field.name: amount if field.type == "float" else count for field in fields(Counters)
    }
    rate = {"type": ["number", "null"], "minimum": 0, "description": "null: not measured yet"}
    return {
        "State": {
            "type": "object",
            "description": "All data-parallel engines of a worker as one. With the plugin off only "
            "the required members need be there; a part that is not in use is left out.",
            "required": ["version", "engines", "enabled"],
            "properties": {
                "version": {"const": VERSION},
                "engines": {"type": "integer", "minimum": 1},
                "enabled": {"type": "boolean", "description": "whether the plugin is on"},
                "off_reason": {"type": ["string", "null"], "description": "why it went off"},
                "policy": {"type": "string"},
                "scheduling_policy": {
                    "type": "string",
                    "description": "order of vLLM's queue: fcfs, or priority, with which it takes "
                    "`X-Vllm-Priority`",
                },
                "num_blocks": count,
                "block_tokens": amount,
                "block_bytes": {**amount, "description": "on one GPU; 0: not known"},
                "pressure": {
                    **amount,
                    "description": "blocks that sessions hold ÷ blocks in GPU memory",
                },
                "prefill_tokens_per_s": rate,
                "queue": _counts("running", "waiting"),
                "max_running": {**count, "description": "requests that run at a time, at most"},
                "free_blocks": {**count, "description": "that no running request uses"},
                "scheduler": {
                    "type": "object",
                    "description": "engine steps, the CPU seconds of the scheduler in them, and "
                    "how often a running request gave way to a waiting one",
                    "properties": {"steps": count, "cpu_s": amount, "gave_way": count},
                },
                "held": _counts("sessions", "runs", "session_blocks"),
                "ghost_blocks": count,
                "counters": {"type": "object", "properties": counters},
                "sessions": {"type": "array", "items": _ref("Session")},
                "last_steps": {"type": "array", "items": _ref("FinishedStep")},
                "host": {
                    "type": "object",
                    "properties": {
                        **_counts("num_blocks", "held_blocks", "refused_blocks")["properties"],
                        "load_tokens_per_s": rate,
                    },
                },
                "prefetch": _counts(
                    *("started", "useful", "late", "wasted", "cancelled"),
                    *("loaded_tokens", "computed_tokens"),
                ),
                "evictions": _counts("unheld", "ended", "idle", "paused", "resuming"),
                "shadow": {
                    "type": "object",
                    "description": "what another policy would have hit",
                    "properties": {
                        "policy": {"type": "string"},
                        "off_reason": {"type": ["string", "null"]},
                        "counters": {"type": "object", "additionalProperties": count},
                    },
                },
            },
        },
        "FinishedStep": {
            "type": "object",
            "description": "a request of a session that has been answered",
            "required": [each.name for each in fields(FinishedStep)],
            "properties": {
                "engine": {"type": "string", "description": "tells engines and starts apart"},
                "number": {**count, "description": "of the engine's such requests"},
                "session_id": {"type": "string"},
                "prompt_tokens": count,
                "cached_tokens": {**count, "description": "of the prompt, in any tier"},
                "output_tokens": count,
            },
        },
        "Session": {
            "type": "object",
            "required": ["session_id"],
            "properties": {
                "session_id": {"type": "string"},
                "gpu_tokens": {**count, "description": "of it in GPU memory"},
                "host_tokens": {**count, "description": "of it in host memory"},
            },
        },
    }


def _error_schema() -> dict[str, Any]:
    error = {
        "type": "object",
        "required": ["message", "code"],
        "properties": {"message": {"type": "string"}, "code": {"type": "integer"}},
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _counts(*names: str) -> dict[str, Any]:
    count = {"type": "integer", "minimum": 0}
    return {"type": "object", "properties": dict.fromkeys(names, count)}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _query(
    name: str, kind: str, low: float, high: float, default: float, text: str
) -> dict[str, Any]:
    schema = {"type": kind, "minimum": low, "maximum": high, "default": default}
    return {"name": name, "in": "query", "description": text, "schema": schema}


def _failures(malformed: str) -> dict[str, Any]:
    return {
        "401": _failure("the API key is missing or wrong"),
        "422": _failure(malformed),
        "503": _failure("the engine does not answer"),
    }


def _failure(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ref("Error")}}}


if __name__ == "__main__":
    print(json.dumps(document(), indent=2, ensure_ascii=False))
