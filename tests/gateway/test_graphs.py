"""The graphs that the gateway has learned, over HTTP and over restarts."""

import asyncio
import json

import pytest

from saga_cli.main import main
from saga_core.aeg import read_aeg
from saga_core.graph import Graphs, Node, Walk
from saga_gateway.graphs import GraphFile
from saga_gateway.identity import new_key

AEG = {
    "version": 1,
    "nodes": [
        {"id": "plan", "agent": "plan", "pause_p50_s": 1.0, "pause_p95_s": 2.0},
        {"id": "run", "agent": "run", "tool": "bash", "pause_p50_s": 10.0, "pause_p95_s": 90.0},
    ],
    "edges": [
        {"from": "plan", "to": "run", "probability": 1.0},
        {"from": "run", "to": "run", "probability": 0.75},
    ],
}
PATH = "/saga/v1/workflows/swe/aeg"


async def learn(gateway, worker, eventually, tasks=3):
    for task in range(tasks):
        for tools in (("read_file",), ("bash",), ()):
            worker.call_tools(*tools)
            await gateway.chat(f"t{task}", Workflow_ID="swe")
            gateway.clock.advance(5.0)
        await gateway.events({"event": "session_end", "session_id": f"t{task}"})


async def test_what_was_learned_is_shown_in_every_form(gateway, worker, eventually):
    await learn(gateway, worker, eventually)
    listed = (await gateway.client.get("/saga/v1/workflows")).json()["workflows"]
    known = {"tenant": None, "workflow": "swe", "nodes": 3, "edges": 3, "is_cold": True}
    assert listed == [{**known, "tasks": pytest.approx(3.0)}]
    shown = (await gateway.client.get(PATH)).json()
    edges = {(edge["from"], edge["to"]): edge["probability"] for edge in shown["edges"]}
    assert edges["read_file", "bash"] == 1.0
    ends = {node["id"]: node["p_end"] for node in shown["nodes"]}
    assert ends == {"read_file": 0.0, "bash": 0.0, "step": 1.0}
    (read,) = [node for node in shown["nodes"] if node["id"] == "read_file"]
    assert read["pauses"] == 3
    dot = await gateway.client.get(PATH, params={"format": "dot"})
    assert dot.text.startswith('digraph "swe"')
    mermaid = await gateway.client.get(PATH, params={"format": "mermaid"})
    assert mermaid.text.startswith("flowchart TD")
    wrong = await gateway.client.get(PATH, params={"format": "svg"})
    assert wrong.status_code == 422
    assert "json, dot, mermaid" in wrong.json()["error"]["message"]


async def test_a_graph_that_is_declared_is_used_from_the_first_step_on(gateway, worker, eventually):
    declared = await gateway.client.put(PATH, json=AEG)
    assert declared.status_code == 200
    assert {node["id"] for node in declared.json()["nodes"]} == {"plan", "run/bash"}
    worker.call_tools("bash")
    await gateway.chat("s", Workflow_ID="swe", Node="run")
    await eventually(lambda: worker.notices)
    assert worker.notices[0]["p_reuse"] == pytest.approx(0.75, abs=0.05)
    assert worker.notices[0]["pause_p95_s"] == pytest.approx(90.0, rel=0.3)
    again = await gateway.client.put(PATH, json=(await gateway.client.get(PATH)).json())
    assert again.status_code == 200


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "unexpected end"),
        (b"[]", "aeg"),
        (json.dumps({**AEG, "version": 9}).encode(), "version"),
        (json.dumps({**AEG, "edges": [{"from": "x", "to": "run"}]}).encode(), "edges[0].from"),
    ],
)
async def test_a_graph_that_is_none_is_refused_and_changes_nothing(gateway, body, words):
    response = await gateway.client.put(PATH, content=body)
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "malformed_aeg"
    assert words in response.json()["error"]["message"]
    assert (await gateway.client.get(PATH)).status_code == 404


async def test_tenants_see_their_own_graphs_alone(start_gateway, worker, tmp_path):
    keys = {}
    entries = []
    for tenant in ("a", "b", "ops"):
        keys[tenant], entry = new_key(tenant)
        entries.append(entry + ("admin = true\n" if tenant == "ops" else ""))
    file = tmp_path / "keys.toml"
    file.write_text("\n".join(entries))
    gateway = await start_gateway(worker, keys_file=str(file))

    def as_(tenant):
        return {"headers": {"Authorization": f"Bearer {keys[tenant]}"}}

    assert (await gateway.client.put(PATH, json=AEG)).status_code == 401
    assert (await gateway.client.put(PATH, json=AEG, **as_("a"))).status_code == 200
    assert (await gateway.client.get(PATH, **as_("b"))).status_code == 404
    forged = await gateway.client.get(PATH, params={"tenant": "a"}, **as_("b"))
    assert forged.status_code == 404
    assert (await gateway.client.get(PATH, params={"tenant": "a"}, **as_("ops"))).is_success
    for tenant, seen in (("a", 1), ("b", 0), ("ops", 1)):
        listed = await gateway.client.get("/saga/v1/workflows", **as_(tenant))
        assert len(listed.json()["workflows"]) == seen


async def test_what_was_learned_outlives_a_restart(start_gateway, worker, eventually, tmp_path):
    file = tmp_path / "state.json"
    first = await start_gateway(worker, state_file=str(file), state_save_s=0.01)
    await learn(first, worker, eventually)

    def saved():
        return file.exists() and '"swe"' in file.read_text()

    await eventually(saved)
    await first.app.parts.graph_file.save(first.app.sessions.graphs)
    second = await start_gateway(worker, state_file=str(file))
    before, after = [(await each.client.get(PATH)).json() for each in (first, second)]
    assert before == after
    assert after["tasks"] == pytest.approx(3.0)


async def test_it_is_saved_at_a_shutdown(start_gateway, worker, tmp_path, eventually):
    file = tmp_path / "state.json"
    gateway = await start_gateway(worker, state_file=str(file))
    await gateway.client.put(PATH, json=AEG)
    gateway.server.should_exit = True
    await eventually(file.exists)
    assert GraphFile(file).load().workflows() == ((None, "swe"),)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"version": 99}', b'{"version": 1}'])
def test_a_file_that_cannot_be_read_is_set_aside(tmp_path, content, caplog):
    file = tmp_path / "state.json"
    file.write_bytes(content)
    assert len(GraphFile(file).load()) == 0
    assert not file.exists()
    assert (tmp_path / "state.json.unread").read_bytes() == content
    assert "set aside" in caplog.text


def test_a_folder_that_cannot_be_written_is_said_and_does_no_harm(tmp_path, caplog):
    asyncio.run(GraphFile(tmp_path / "none" / "state.json").save(Graphs()))
    assert "cannot be written" in caplog.text


async def test_saga_aeg_show_asks_a_running_gateway(gateway, capsys):
    await gateway.client.put(PATH, json=AEG)
    for words, shown in (
        ([], "swe"),
        (["--workflow", "swe"], "run/bash"),
        (["--workflow", "swe", "--format", "mermaid"], "flowchart TD"),
    ):
        assert await asyncio.to_thread(main, ["aeg", "show", gateway.url, *words]) == 0
        assert shown in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["aeg", "show", gateway.url, "--workflow", "no"]) == 1
    assert "HTTP 404" in capsys.readouterr().err


async def test_an_operator_s_tenant_must_be_a_name(gateway):
    response = await gateway.client.put(PATH, params={"tenant": "x" * 2000}, json=AEG)
    assert response.status_code == 422


async def test_what_a_tenant_declares_pushes_nobody_else_out_and_shows_nothing_of_them():
    graphs = Graphs(max_workflows=10)
    aeg = read_aeg({**AEG, "workflow": "w"})
    graphs.put(("a", "own"), aeg, now_s=0.0)
    walk = Walk(("a", "secret"))
    graphs.stepped(walk, Node(None, "acme_deploy"), now_s=0.0)
    for _ in range(50):
        graphs.returned(walk, 77.0)
        graphs.stepped(walk, Node(None, "acme_deploy"), now_s=0.0)
    for number in range(100):
        graphs.put(("b", f"w{number}"), aeg, now_s=float(number))
    assert {key for key in graphs.workflows() if key[0] == "a"} == {("a", "own"), ("a", "secret")}
    spy = read_aeg({"version": 1, "workflow": "w", "nodes": [{"id": "x", "tool": "acme_deploy"}],
                    "edges": []})  # fmt: skip
    graphs.put(("b", "spy"), spy, now_s=200.0)
    (node,) = graphs.graph(("b", "spy")).nodes
    assert (node.pauses, node.pause_p50_s) == (0, None)
    graphs.check_integrity()


async def test_two_who_save_at_once_leave_a_whole_file(tmp_path):
    file, graphs = GraphFile(tmp_path / "state.json"), Graphs()
    graphs.put((None, "swe"), read_aeg({**AEG, "workflow": "swe"}), now_s=0.0)
    first = asyncio.ensure_future(file.save(graphs))
    await asyncio.sleep(0)
    first.cancel()
    await file.save(graphs)
    assert file.load().workflows() == ((None, "swe"),)
