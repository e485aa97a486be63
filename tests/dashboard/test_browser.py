"""The dashboard in a real Chromium, before a gateway over stand-in workers."""

from __future__ import annotations

from itertools import pairwise

from saga_gateway.dashboard_pages import NAMES
from saga_gateway.identity import new_key

ATTACK = "<img src=x onerror=window.attacked=1><script>window.attacked=1</script>"
REFRESHED = "document.getElementById('main').dataset.refreshed"


async def test_the_overview_shows_a_worker_and_a_session_that_waits(gateway, worker, browser):
    worker.call_tools("run_tests")
    await gateway.chat("session-1", workflow_id="swe")
    await browser.open(gateway.url + "/dashboard")
    assert worker.worker_id in await browser.text("#workers")
    sessions = await browser.text("#sessions")
    assert "session-1" in sessions
    assert "paused" in sessions
    assert "run_tests" in sessions
    assert await browser.errors() == []


async def test_it_shows_what_happens_without_being_loaded_again(gateway, worker, browser):
    worker.call_tools("run_tests")
    await browser.open(gateway.url + "/dashboard")
    await browser.run("window.loaded_once = true;")
    assert "No session yet" in await browser.text("#sessions")
    await gateway.chat("session-1")
    await browser.until("document.getElementById('sessions').innerText.includes('paused')")
    await gateway.events({"event": "session_end", "session_id": "session-1"})
    await browser.until("document.getElementById('sessions').innerText.includes('No session yet')")
    assert await browser.run("return window.loaded_once;") is True
    assert await browser.errors() == []


async def test_it_rests_while_it_is_hidden_or_told_to(gateway, browser, eventually):
    await browser.open(gateway.url + "/dashboard")
    await browser.until(REFRESHED)
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, value: %s});"
    tell = "document.dispatchEvent(new Event('visibilitychange'));"
    await browser.run(hide % "true" + tell)
    await browser.run(
        "const ask = window.fetch; window.asked = 0;"
        "window.fetch = (...all) => { window.asked++; return ask(...all); };"
        "window.ticks = 0; setInterval(() => window.ticks++, 500);"
    )
    await browser.until("window.ticks >= 6")
    assert await browser.run("return window.asked;") == 0
    await browser.run(hide % "false" + tell)
    await browser.until("window.asked > 0")
    await browser.run("document.getElementById('pause').click();")
    assert await browser.text("#status") == "Paused"
    asked, ticks = await browser.run("return [window.asked, window.ticks];")
    await browser.until(f"window.ticks >= {ticks + 6}")
    assert await browser.run("return window.asked;") == asked


async def test_a_graph_has_its_nodes_and_edges(gateway, browser):
    document = {
        "version": 1,
        "nodes": [
            {"id": "plan", "agent": "planner", "pause_p50_s": 1, "pause_p95_s": 2},
            {"id": "search", "agent": "worker", "tool": "web_search"},
            {"id": "run", "agent": "worker", "tool": "bash", "pause_p50_s": 10, "pause_p95_s": 90},
        ],
        "edges": [
            {"from": "plan", "to": "run", "probability": 0.6},
            {"from": "plan", "to": "search", "probability": 0.4},
            {"from": "search", "to": "run", "probability": 1.0},
            {"from": "run", "to": "run", "probability": 0.5},
            {"from": "run", "to": "plan", "probability": 0.25},
        ],
    }
    await gateway.client.put("/saga/v1/workflows/swe/aeg", json=document)
    await browser.open(gateway.url + "/dashboard/workflows")
    await browser.run("document.querySelector('#workflows a[href*=swe]').click();")
    await browser.until("document.querySelector('svg.graph')")
    labels = await browser.run(
        "return [...document.querySelectorAll('svg .label text')].map(each => each.textContent);"
    )
    assert len(labels) == 7
    assert sum(label.startswith("25 %") for label in labels) == 2  # To the plan, and to the end.
    assert sum(" / " in label for label in labels) == 4  # After a search nobody knows how long.
    boxes = await browser.run(
        "return [...document.querySelectorAll('svg .node rect')].map(each => {"
        " const at = each.getBoundingClientRect();"
        " return [at.left, at.top, at.right, at.bottom]; });"
    )
    assert len(boxes) == 3
    for one, other in pairwise(sorted(boxes, key=lambda box: box[1])):
        assert one[3] < other[1] or one[2] < other[0] or other[2] < one[0]
    drawn = await browser.run(
        "const edges = [...document.querySelectorAll('svg .edge')];"
        "return edges.every(each => each.getTotalLength() > 9);"
    )
    assert drawn
    assert await browser.errors() == []


async def test_an_attack_stays_text(gateway, worker, browser, eventually):
    document = {
        "version": 1,
        "nodes": [{"id": ATTACK, "agent": ATTACK, "tool": ATTACK}],
        "edges": [],
    }
    await gateway.client.put("/saga/v1/workflows/swe/aeg", json=document)
    worker.steps, worker.facts = [], {"queue": {"running": 0, "waiting": 0}, "policy": ATTACK}
    await eventually(lambda: gateway.app._dispatcher.state(worker.worker_id))
    worker.call_tools(ATTACK)
    await gateway.chat("s", workflow_id="swe")
    for path in ("/dashboard", "/dashboard/workflows/swe"):
        await browser.open(gateway.url + path)
        await browser.until(REFRESHED)
        assert "<img src=x" in await browser.text("main")
        assert await browser.run("return window.attacked === undefined;")
        assert (
            await browser.run("return document.querySelectorAll('main img, main script').length;")
            == 0
        )
    assert await browser.errors() == []


async def test_an_inline_script_would_not_run(gateway, browser):
    await browser.open(gateway.url + "/dashboard")
    await browser.run(
        "const bad = document.createElement('script'); bad.textContent = 'window.attacked = 1';"
        "document.body.append(bad);"
    )
    assert await browser.run("return window.attacked === undefined;")
    assert any("Content Security Policy" in each for each in await browser.errors())


async def test_every_page_works_with_a_password_and_without_complaints(
    start_gateway, worker, browser, tmp_path
):
    key, entry = new_key("ops")
    (tmp_path / "keys.toml").write_text(f"{entry}admin = true\n")
    gateway = await start_gateway(worker, keys_file=str(tmp_path / "keys.toml"))
    for path in NAMES:
        await browser.open(f"http://me:{key}@127.0.0.1:{gateway.port}{path}")
        await browser.until(REFRESHED)
        assert await browser.text("#status") == "Live"
        assert await browser.text("h1") == NAMES[path]
    assert await browser.errors() == []


async def test_it_says_when_the_gateway_is_gone_and_goes_on_when_it_is_back(
    gateway, browser, eventually
):
    await browser.open(gateway.url + "/dashboard")
    await browser.until(REFRESHED)
    dashboard = gateway.app._dashboard
    serve = gateway.app._routes["/dashboard"]["GET"]

    async def broken(scope, receive, send):
        await dashboard._refuse(send, 503, "broken")

    gateway.app._routes["/dashboard"]["GET"] = broken
    await browser.until("document.querySelector('#status .bad')")
    gateway.app._routes["/dashboard"]["GET"] = serve
    await browser.until("document.getElementById('status').innerText === 'Live'")


async def test_it_fits_a_phone_in_both_colour_schemes(gateway, worker, browser):
    worker.call_tools("run_tests")
    await gateway.chat("a-session-with-a-long-name-that-would-not-fit", workflow_id="swe")
    await browser.resize(400, 800)
    colours = set()
    for scheme in ("light", "dark"):
        await browser.emulate(prefers_color_scheme=scheme)
        for path in (*NAMES, "/dashboard/workflows/swe"):
            await browser.open(gateway.url + path)
            assert await browser.run("return document.documentElement.scrollWidth;") <= 400
        back, text = await browser.run(
            "const style = getComputedStyle(document.body);"
            "return [style.backgroundColor, style.color];"
        )
        colours.add(back)
        assert _contrast(back, text) > 7.0
        for badge in ("paused", "cold"):
            await browser.open(gateway.url + "/dashboard")
            back, text = await browser.run(
                f"const style = getComputedStyle(document.querySelector('.badge.{badge}'));"
                "return [style.backgroundColor, style.color];"
            )
            assert _contrast(back, text) >= 4.5
    assert len(colours) == 2


def _contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG, of two colours as CSS writes them."""

    def luminance(colour: str) -> float:
        parts = [int(each) / 255 for each in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


async def test_the_keyboard_stays_where_it_is_over_a_refresh(gateway, worker, browser):
    worker.call_tools("run_tests")
    await gateway.chat("s", workflow_id="swe")
    await browser.open(gateway.url + "/dashboard")
    await browser.run("document.querySelector('#sessions td a').focus();")
    gateway.clock.advance(5.0)  # What is shown of the pause changes.
    await browser.until("document.getElementById('sessions').innerText.includes('5 s')")
    focused = await browser.run("return document.activeElement.getAttribute('href');")
    assert focused == "/dashboard/workflows/swe"
