"""`saga up`: its words, what it refuses before anything is started, and its log."""

from __future__ import annotations

import asyncio
import io
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from saga_cli import up, up_words, worker
from saga_cli.main import main
from saga_cli.up_log import LogView, use_color

# The log


async def _written(names: Sequence[str], output: Mapping[str, bytes], *, color: bool) -> str:
    stream = io.StringIO()
    log = LogView(names, stream, color=color)
    for name in names:
        os.write(await log.open(name), output[name])
    log.say("hello")
    await log.close()
    return stream.getvalue()


def test_each_line_stands_behind_its_process() -> None:
    output = {"worker-0": b"one\n\xff two\r\n", "gateway": b" 10%\r 20%\r 30%\nends without"}
    text = asyncio.run(_written(list(output), output, color=False))
    assert sorted(text.splitlines()) == [
        "gateway  |  30%",
        "gateway  | ends without",
        "saga     | hello",
        "worker-0 | one",
        "worker-0 | \ufffd two",
    ]


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    text = asyncio.run(_written(["worker-0"], {"worker-0": b"one\n"}, color=True))
    assert "\x1b[36mworker-0 | \x1b[0mone\n" in text
    stream = io.StringIO()
    assert not use_color(stream, {})
    monkeypatch.setattr(stream, "isatty", lambda: True)
    assert use_color(stream, {})
    assert not use_color(stream, {"NO_COLOR": "1"})


def test_the_last_lines_are_kept_and_an_endless_one_is_cut() -> None:
    async def scenario() -> str:
        log = LogView(["w"], io.StringIO(), color=False)
        descriptor = await log.open("w")
        os.write(descriptor, b"".join(b"%d\n" % n for n in range(40)) + b"begun")
        while not log.last_lines("w").endswith("begun"):  # noqa: ASYNC110 - a pipe is read
            await asyncio.sleep(0)
        last = log.last_lines("w")
        await log.close()
        return last

    assert asyncio.run(scenario()).split() == [
        word for n in (*range(11, 40), "begun") for word in ("|", str(n))
    ]


def test_a_reader_that_goes_is_noticed() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    async def scenario() -> bool:
        log = LogView(["w"], Gone(), color=False)
        log.say("anybody there?")
        log.say("nobody")
        return log.broken.is_set()

    assert asyncio.run(scenario())


# Words, and what is refused before anything is started


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command says when it refuses its words: one line."""

    def run(*words: str) -> str:
        try:
            assert main(["up", *words]) == 1
        except SystemExit as end:
            assert end.code == 2  # noqa: PT017 - argparse ends programs
        said = capsys.readouterr().err.strip()
        assert "Traceback" not in said
        return said.rpartition("\n")[2]

    return run


def test_words_behind_the_dashes_are_the_workers() -> None:
    assert up_words.split(["up", "m", "--workers", "3", "--", "--port", "--"]) == (
        ["up", "m", "--workers", "3"],
        ["--port", "--"],
    )
    assert up_words.split(["worker", "m", "--", "x"]) == (["worker", "m", "--", "x"], [])


def test_the_help_says_what_goes_where(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    text = capsys.readouterr().out
    for word in ("--workers N", "--gpus", "--worker-port", "--set NAME=VALUE", " -- --max-model"):
        assert word in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/no/such/model"], "there is no /no/such/model: give a model's folder, or its name"),
        (["a/b/c"], "there is no a/b/c"),
        (["m", "--workers", "0"], "--workers 0: there must be at least one"),
        (["m", "--", "--port=1"], "use --worker-port"),
        (["m", "--max-model-len", "9"], "options of the workers stand behind --, as in"),
        (["m", "--", "--saga-policy", "best"], "--saga-policy='best': choose one of off, "),
        (["m", "--", "--saga-host-gib=lots"], "--saga-host-gib='lots' must be a number"),
        (["m", "--set", "drain_s=soon"], "--set drain_s=soon must be a whole number"),
        (["m", "--gpus", "0"], "is its CPU build, which uses no GPU"),
        (["m", "--worker-port", "65535", "--workers", "2"], "from 1 to 65535"),
        (["m", "--worker-port", "8799", "--workers", "2"], "8800 is the gateway's"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    words: list[str], said: str, refuse: Callable[..., str]
) -> None:
    assert said in refuse(*words)


def test_a_folder_without_a_model_is_refused(tmp_path: Path, refuse: Callable[..., str]) -> None:
    assert f"the folder {tmp_path} holds no model" in refuse(str(tmp_path))


def test_without_vllm_the_command_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., str]
) -> None:
    monkeypatch.setattr(worker, "find_spec", lambda name: None)
    assert "vLLM is not installed: pip install 'saga-sdk[vllm]'" in refuse("m")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0,2"], "there is no GPU 2 here, only 0, 1"),
        (["--gpus", ","], "names none"),
        (["--gpus", "none"], "no GPU to use, and the vLLM that is installed is not its CPU build"),
        (["--workers", "3"], "3 workers need at least a GPU each and there are 2 (0,1)"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    words: list[str], said: str, refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "_is_cpu_build", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert said in refuse("m", *words)


def test_a_failing_nvidia_smi_is_no_host_without_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[..., str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'driver mismatch'\nexit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(up, "_is_cpu_build", lambda: False)
    assert "nvidia-smi fails (driver mismatch): name the GPUs with --gpus" in refuse("m")


def test_a_port_in_use_is_named_with_its_option(refuse: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}: Address already in use. Give another --port" in refuse(
            "m", "--port", port
        )
        assert "Give another --worker-port" in refuse("m", "--worker-port", port)


def test_default_ports_of_workers_are_the_first_free_ones() -> None:
    first, second, third = up.worker_ports(None, 3, avoid=0)
    assert first < second < third
    with socket.create_server(("127.0.0.1", first)):
        assert up.worker_ports(None, 1, avoid=second) == [third]


def _plan(*words: str, gpus: str | None = None, monkeypatch: pytest.MonkeyPatch) -> up.Plan:
    seen = []

    def run(options: Any, rest: Sequence[str]) -> int:
        seen.append(up.make_plan(options, rest))
        return 0

    monkeypatch.setattr(up, "run", run)
    if gpus is not None:
        monkeypatch.setattr(up, "_is_cpu_build", lambda: False)
        monkeypatch.setattr(up, "visible_gpus", lambda environment: gpus.split(","))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["up", "m", *words]) == 0
    return seen[0]


def test_the_gateway_has_its_own_settings_and_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGA_GATEWAY_HOST", "0.0.0.0")
    words = ("--workers", "2", "--port", "0", "--set", "drain_s=7", "--", "--max-model-len", "9")
    plan = _plan(*words, monkeypatch=monkeypatch)
    assert (plan.gateway_host, plan.drain_s) == ("127.0.0.1", 7)
    assert plan.worker_words == ["--max-model-len", "9"]
    urls = [f"http://127.0.0.1:{port}" for _, port in plan.workers]
    assert plan.gateway_words == [
        *("--port", str(plan.gateway_port)),
        *(word for url in urls for word in ("--worker", url)),
        *("--set", "drain_s=7"),
    ]
    assert plan.gateway_port > 0


def test_numbers_of_gpus_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _plan("--workers", "2", gpus="0,1,2,3", monkeypatch=monkeypatch)
    first, second = (share for share, _ in plan.workers)
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert first.environment == {**order, "CUDA_VISIBLE_DEVICES": "0,1"}
    assert second.environment == {**order, "CUDA_VISIBLE_DEVICES": "2,3"}
