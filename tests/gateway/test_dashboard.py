"""The dashboard over HTTP: who may see it, what it says, and what it does not let through."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest

from saga_gateway.dashboard_pages import NAMES
from saga_gateway.identity import new_key

PAGES = list(NAMES)
ATTACK = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'"
STATIC = ["dashboard.css", "dashboard.js", "icon.svg"]


def basic(key, user="anybody"):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{key}".encode()).decode()}


@pytest.fixture
def key_file(tmp_path):
    keys, entries = {}, []
    for tenant, more in (("ops", "admin = true\n"), ("team-a", "")):
        keys[tenant], entry = new_key(tenant)
        entries.append(entry + more)
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(entries))
    return str(path), keys


async def page(gateway, path="/dashboard", **named):
    gateway.app._overview._taken = None
    response = await gateway.client.get(path, **named)
    assert response.status_code == 200, response.text
    return response.text


async def declare(gateway, nodes, edges, name="swe"):
    document = {"version": 1, "nodes": nodes, "edges": edges}
    response = await gateway.client.put(f"/saga/v1/workflows/{name}/aeg", json=document)
    assert response.status_code == 200, response.text


class Tags(HTMLParser):
    """The elements of a page, their attributes, and those that are left open."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, text):
        super().__init__()
        self.seen, self.open, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_is_well_formed_and_says_where_it_is(gateway, worker, path):
    worker.call_tools("bash")
    await gateway.chat("s", workflow_id="swe")
    text = await page(gateway, path)
    tags = Tags(text)
    assert tags.open == []
    assert len(set(tags.ids)) == len(tags.ids)
    here = [each for tag, each in tags.seen if tag == "a" and each.get("aria-current") == "page"]
    assert [each["href"] for each in here] == [path]
    assert f"<title>{NAMES[path]} - SAGA</title>" in text
    for name, attributes in tags.seen:
        if name == "table":
            assert "<caption>" in text
        if name == "th":
            assert attributes["scope"] in ("col", "row")


@pytest.mark.parametrize("path", [*PAGES, *(f"/dashboard/static/{name}" for name in STATIC)])
async def test_nothing_comes_from_elsewhere_and_no_script_stands_in_a_page(gateway, path):
    response = await gateway.client.get(path)
    policy = response.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"
    outside = [
        url for url in re.findall(r"https?://[^\s\"'<)]+", response.text) if "w3.org" not in url
    ]
    assert outside == []
    if path.endswith(("css", "js", "svg")):
        return
    for tag, attributes in Tags(response.text).seen:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        if tag == "script":
            assert attributes["src"].startswith("/dashboard/static/")


async def test_it_is_light(gateway):
    sizes = {
        name: len((await gateway.client.get(f"/dashboard/static/{name}")).content)
        for name in STATIC
    }
    assert sum(sizes.values()) < 20_000


async def test_the_overview_shows_workers_and_sessions(gateway, worker, eventually):
    worker.steps = []
    worker.facts = {
        "queue": {"running": 1, "waiting": 0},
        "num_blocks": 100,
        "block_tokens": 16,
        "free_blocks": 25,
        "pressure": 0.6,
        "policy": "saga",
        "counters": {"prompt_tokens": 1000, "cached_tokens": 800, "regret_tokens": 20},
        "host": {"num_blocks": 1000, "held_blocks": 100},
    }
    await eventually(lambda: gateway.app._dispatcher.state(worker.worker_id))
    worker.call_tools("run_tests")
    await gateway.chat("session-1", workflow_id="swe")
    gateway.clock.advance(3.0)
    text = await page(gateway)
    for shown in (
        worker.worker_id,
        "1.2 k of 1.6 k",
        "1.6 k of 16 k",
        "60 %",
        "80 %",
        "session-1",
        '<span class="badge paused">paused</span> 3 s',
        "run_tests",
        '<a href="/dashboard/workflows/swe">swe</a>',
        "least load",
        "without a key",
    ):
        assert shown in text


async def test_a_fragment_is_the_content_alone(gateway):
    text = await page(gateway, "/dashboard?fragment=1")
    assert text.startswith("<h1>Overview</h1>")
    assert "<html" not in text
    assert re.findall(r'<section id="([a-z]+)"', text) == [
        *("now", "workers", "savings", "sessions", "workflows", "tenants", "decisions")
    ]


async def test_a_graph_is_drawn_with_probabilities_and_pauses(gateway):
    nodes = [
        {"id": "plan", "agent": "planner", "pause_p50_s": 1, "pause_p95_s": 2},
        {"id": "run", "agent": "worker", "tool": "bash", "pause_p50_s": 10, "pause_p95_s": 90},
    ]
    edges = [
        {"from": "plan", "to": "run", "probability": 1.0},
        {"from": "run", "to": "run", "probability": 0.75},
        {"from": "run", "to": "plan", "probability": 0.05},
    ]
    await declare(gateway, nodes, edges)
    text = await page(gateway, "/dashboard/workflows/swe")
    tags = Tags(text)
    assert tags.open == []
    paths = [each for tag, each in tags.seen if tag == "path" and "edge" in each.get("class", "")]
    assert len(paths) == 5  # Start to plan, the three, and run to the end.
    assert sum("edge used" in each["class"] for each in paths) == 3
    labels = re.findall(r'<g class="label">.*?<text[^>]*>([^<]*)</text>', text)
    assert len(labels) == 5
    assert any(re.fullmatch(r"75 % · (9\.\d+|10(\.\d)?) s / .*", each) for each in labels)
    assert "20 %" in labels
    assert "bash" in text
    assert 'href="/saga/v1/workflows/swe/aeg"' in text


async def test_what_clients_and_workers_call_things_stays_text(gateway, worker, eventually):
    nodes = [
        {"id": ATTACK, "agent": ATTACK, "tool": ATTACK, "pause_p50_s": 1, "pause_p95_s": 2},
        {"id": "b", "agent": "]]></svg><script>alert(3)</script>"},
    ]
    edges = [{"from": ATTACK, "to": "b", "probability": 0.5}]
    await declare(gateway, nodes, edges)
    worker.call_tools(ATTACK)
    worker.steps, worker.facts = [], {"queue": {"running": 0, "waiting": 0}, "policy": ATTACK}
    await eventually(lambda: gateway.app._dispatcher.state(worker.worker_id))
    await gateway.chat(None)
    headers = {"X-SAGA-Session-ID": ATTACK, "X-SAGA-Workflow-ID": ATTACK, "X-SAGA-Node": ATTACK}
    await gateway.client.post("/v1/chat/completions", json={"model": ATTACK}, headers=headers)
    shown = False
    for path in (*PAGES, "/dashboard/workflows/swe"):
        text = await page(gateway, path)
        tags = Tags(text)
        assert tags.open == []
        assert not [tag for tag, _ in tags.seen if tag == "img"]
        assert [each.get("src") for tag, each in tags.seen if tag == "script"] == [
            "/dashboard/static/dashboard.js"
        ]
        shown = shown or "&lt;script&gt;alert(1)" in text
    assert shown


@pytest.mark.parametrize(
    "path",
    [
        "/dashboard/nothing",
        "/dashboard/workflows/unknown",
        "/dashboard/workflows/..%2f..%2fstatic",
        "/dashboard/workflows/%3Cscript%3E",
        "/dashboard/workflows/swe?tenant=%3Cscript%3E",
        "/dashboard/static/page.html",
        "/dashboard/static/../app.py",
    ],
)
async def test_what_is_not_there_is_not_found(gateway, path):
    response = await gateway.client.get(path)
    assert response.status_code == 404
    assert "<script>" not in response.text
    assert "content-security-policy" in response.headers


async def test_a_slash_at_the_end_does_no_harm(gateway):
    assert (await gateway.client.get("/dashboard/")).status_code == 200
    assert (await gateway.client.get("/dashboard/sessions/")).status_code == 200


@pytest.mark.parametrize("path", [*PAGES, "/dashboard/workflows/x"])
async def test_it_is_read_only(gateway, path):
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert (await gateway.client.request(method, path)).status_code == 405


async def test_head_has_no_body(gateway):
    head = await gateway.client.head("/dashboard")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 1000


# With API keys


@pytest.mark.parametrize("path", [*PAGES, "/dashboard/static/dashboard.js", "/dashboard/nothing"])
async def test_a_browser_is_asked_for_a_password(start_gateway, worker, key_file, path):
    keys_file, keys = key_file
    gateway = await start_gateway(worker, keys_file=keys_file)
    get = gateway.client.get
    for headers in (
        {},
        basic("wrong"),
        basic(""),
        basic(keys["team-a"]),
        {"Authorization": "Basic !"},
    ):
        response = await get(path, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith("Basic realm=")
        assert worker.worker_id not in response.text
    expected = 404 if path.endswith("nothing") else 200
    assert (await get(path, headers=basic(keys["ops"]))).status_code == expected
    bearer = {"Authorization": f"Bearer {keys['ops']}"}
    assert (await get(path, headers=bearer)).status_code == expected
    assert (await get(path, headers={"X-API-Key": keys["team-a"]})).status_code == 403


async def test_no_other_path_takes_a_password(start_gateway, worker, key_file):
    keys_file, keys = key_file
    gateway = await start_gateway(worker, keys_file=keys_file)
    drain = f"/saga/v1/workers/{worker.worker_id}:drain"
    for method, path in (("POST", drain), ("GET", "/saga/v1/overview"), ("GET", "/v1/models")):
        response = await gateway.client.request(method, path, headers=basic(keys["ops"]))
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"


async def test_a_session_of_a_tenant_is_shown_by_its_hash(start_gateway, worker, key_file):
    keys_file, keys = key_file
    gateway = await start_gateway(worker, keys_file=keys_file)
    worker.call_tools("bash")
    headers = {
        "X-API-Key": keys["team-a"],
        "X-SAGA-Session-ID": "private",
        "X-SAGA-Workflow-ID": "w",
    }
    await gateway.client.post("/v1/chat/completions", json={"model": "m"}, headers=headers)
    text = await page(gateway, headers=basic(keys["ops"]))
    assert "private" not in text
    assert 'href="/dashboard/workflows/w?tenant=team-a"' in text
    graph = await page(gateway, "/dashboard/workflows/w?tenant=team-a", headers=basic(keys["ops"]))
    assert "of tenant team-a" in graph


async def test_pages_are_counted_by_their_path(gateway):
    await page(gateway, "/dashboard")
    await page(gateway, "/dashboard/tenants")
    metrics = (await gateway.client.get("/metrics")).text
    assert 'saga_gateway_responses_total{path="/dashboard/tenants",status="200"} 1.0' in metrics
