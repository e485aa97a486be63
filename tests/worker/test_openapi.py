"""The OpenAPI document of the control API says what the worker does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpu_backend.openapi import API_VERSION, document
from gpu_backend.state_feed import merged
from saga_core.errors import NoticeError
from saga_core.notices import (
    EndNotice,
    PauseNotice,
    ResumeNotice,
    decode_notices,
    encode_notices,
)
from saga_core.types import Pause
from tests.worker.fake_engine import FakeWorker
from tests.worker.test_metrics import FULL

FILE = Path("docs/api/worker.openapi.json")


def _is_valid(name: str, value: object) -> bool:
    schema = {**document(), "$ref": f"#/components/schemas/{name}"}
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_the_file_in_the_docs_is_that_of_this_version() -> None:
    assert json.loads(FILE.read_text()) == document(), (
        "python -m gpu_backend.openapi > docs/api/worker.openapi.json writes it anew"
    )
    assert document()["info"]["version"] == API_VERSION


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(document())
    used = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert used == set(document()["components"]["schemas"])


async def test_it_has_every_route_of_the_worker_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SAGA_PREFETCH", "0")
    worker = await FakeWorker(monkeypatch).start()
    routes = {
        (route.path, method.lower())
        for route in worker.app.routes
        for method in getattr(route, "methods", ())
        if route.path.startswith("/saga/")
    }
    paths = document()["paths"]
    assert routes == {(path, method) for path in paths for method in paths[path]}


def _pause(**changes: Any) -> dict[str, Any]:
    return {"kind": "pause", "session_id": "a", "p_reuse": 0.5, "pause_p95_s": 3, **changes}


@pytest.mark.parametrize(
    "body",
    [
        encode_notices([]),
        encode_notices([EndNotice("a"), ResumeNotice("b", 3.0)]),
        encode_notices([PauseNotice("a", Pause(0.5, 10.0, "bash", 2.0))]),
        {"version": 1, "notices": [_pause(tool_name=None, pause_p50_s=None)]},
        {"version": 1, "notices": [_pause(unknown="x")]},
        {},
        [],
        {"version": 2, "notices": []},
        {"version": 1, "notices": [{"kind": "end"}] * 2},
        {"version": 1, "notices": [{"kind": "end", "session_id": "a"}] * 1025},
        {"version": 1, "notices": [{"kind": "end", "session_id": "a" * 257}]},
        {"version": 1, "notices": [_pause(p_reuse=1.5)]},
        {"version": 1, "notices": [_pause(p_reuse=True)]},
        {"version": 1, "notices": [_pause(p_reuse=None)]},
        {"version": 1, "notices": [_pause(pause_p95_s=86_401)]},
        {"version": 1, "notices": [_pause(tool_name="")]},
        {"version": 1, "notices": [{"kind": "resume_soon", "session_id": "a", "in_s": -1}]},
        {"version": 1, "notices": [{"kind": "rest", "session_id": "a"}]},
    ],
)
def test_it_takes_and_refuses_the_notices_that_the_worker_does(body: Any) -> None:
    try:
        decode_notices(body)
        is_taken = True
    except NoticeError:
        is_taken = False
    assert _is_valid("NoticeBatch", body) is is_taken


def test_it_describes_every_part_of_a_state() -> None:
    state = merged([FULL])
    assert _is_valid("State", state)
    assert set(state) <= set(document()["components"]["schemas"]["State"]["properties"])
    assert _is_valid("State", merged([{"enabled": False}]))
    assert not _is_valid("State", {**state, "pressure": -1})
    assert not _is_valid("State", {**state, "enabled": None})
