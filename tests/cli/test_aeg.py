"""`saga aeg`: learn, show and eval, as they are typed."""

import gzip
import json

import pytest

from saga_cli.main import main


def span(name, agent, start_s, end_s, messages, output, tool=None):
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.agent.name": agent,
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.output.text": output,
    }
    time = "2026-01-01T00:00:{:06.3f}".format
    own = {"trace_id": "t", "span_id": name, "parent_span_id": None, "name": f"chat {agent}"}
    return {**own, "start_time": time(start_s), "end_time": time(end_s), "attributes": attributes}


@pytest.fixture
def spans(tmp_path):
    """Two turns of one agent, in a file of spans."""
    opening = [{"role": "user", "content": "Why does the parser drop the last token of a file?"}]
    answer = "It reads one token ahead, and returns before that one has been handed on."
    then = [*opening, {"role": "assistant", "content": answer}]
    then.append({"role": "user", "content": "Mend it, please."})
    file = tmp_path / "mend.json"
    content = {"spans": [
        span("a", "reader", 0.0, 1.0, opening, answer),
        span("b", "writer", 3.0, 4.0, then, "Done."),
    ]}  # fmt: skip
    file.write_text(json.dumps(content))
    return file


@pytest.fixture
def flat(tmp_path):
    """Two tasks of flat prompts, each of which begins with the one before."""
    folder = tmp_path / "flat"
    folder.mkdir()
    for task in ("one", "two"):
        text, rows = f"Task {task}: find why the {task} test fails.\n" * 8, []
        for step in range(6):
            answer = f"Look.\n```bash\ngrep -n {task} {step}.py\n```"
            row = {"timestamp": 10**6 * (1 + 5 * step), "input": text, "output": answer}
            rows.append(json.dumps({**row, "session_id": task}))
            text += f"\n{answer}\nresult {step} of {task}: nothing was found in that file\n"
        with gzip.open(folder / f"swe_{task}.jsonl.gz", "wt") as file:
            file.write("\n".join(rows))
    return folder


def test_what_is_learned_from_spans_is_shown(spans, tmp_path, capsys):
    state = tmp_path / "state.json"
    assert main(["aeg", "learn", str(spans), "--state", str(state)]) == 0
    assert "2 steps of 1 sessions, 1 workflows" in capsys.readouterr().out
    assert main(["aeg", "show", str(state)]) == 0
    assert "mend" in capsys.readouterr().out
    words = ["aeg", "show", str(state), "--workflow", "mend"]
    assert main(words) == 0
    assert "writer 100%" in capsys.readouterr().out
    assert main([*words, "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    edges = {(edge["from"], edge["to"]): edge["probability"] for edge in shown["edges"]}
    assert edges == {("<start>", "reader"): 1.0, ("reader", "writer"): 1.0}
    assert main([*words, "--format", "dot"]) == 0
    assert capsys.readouterr().out.startswith('digraph "mend"')


def test_edges_between_spans_are_told_and_scored(spans, tmp_path, capsys):
    true = tmp_path / "edges.json"
    true.write_text(json.dumps({"mend": [["a", "b"]]}))
    out = tmp_path / "out.json"
    words = ["aeg", "eval", str(spans), "--hide-ids", "--edges", str(true), "--json", str(out)]
    assert main(words) == 0
    found = json.loads(out.read_text())["edges"]["mend"]
    assert (found["edges"], found["precision"], found["recall"]) == ([["a", "b"]], 1.0, 1.0)
    assert "mend" in capsys.readouterr().out


def test_flat_prompts_are_told_apart_and_foretold(flat, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["aeg", "eval", str(flat), "--hide-ids", "--folds", "2", "--json", str(out)]
    assert main(words) == 0
    found = json.loads(out.read_text())
    tasks = found["identification"]["tasks of swe, without links"]
    assert (tasks["requests"], tasks["precision"], tasks["recall"]) == (12, 1.0, 1.0)
    assert found["prediction"]["lmcache"]["outcomes"] == 14
    assert "tasks of swe" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "generated", "--folds", "1"], "--folds must be 2 or more"),
        (["eval", "none.json"], "none.json"),
        (["show", "none.json"], "none.json"),
        (["learn", "none.json", "--state", "/nowhere/at/all"], "cannot be written"),
        (["show", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
    ],
)
def test_what_is_wrong_is_said(words, message, capsys):
    assert main(["aeg", *words]) == 1
    assert message in capsys.readouterr().err


def test_a_workflow_that_is_not_there_is_said(spans, tmp_path, capsys):
    state = tmp_path / "state.json"
    main(["aeg", "learn", str(spans), "--state", str(state)])
    assert main(["aeg", "show", str(state), "--workflow", "none"]) == 1
    assert "no workflow none" in capsys.readouterr().err
