"""Files become one trace: formats, folders, names, clocks, block sizes."""

import shutil

import pytest

import saga_sim.traces
from saga_sim.traces import FORMATS, TraceError, read_trace, write_trace
from tests.sim.traces.support import SAMPLES, check_trace, error_of, ids_of, write_lines

FORMAT_OF = {
    "kv_cache_tester.jsonl": "kv-cache-tester",
    "lmcache.jsonl": "lmcache",
    "mooncake.jsonl": "mooncake",
    "bailian.jsonl": "bailian",
    "spans.json": "otel",
    "otlp.jsonl": "otel",
    "saga.jsonl": "saga",
}
CALL = {"session_id": "a", "arrival_s": 1.5, "input_tokens": 64, "output_tokens": 1}


def saga_call(session_id="a", hash_ids=(), **fields):
    tokens = 64 * len(hash_ids)
    own = {"session_id": session_id, "hash_ids": list(hash_ids), "input_tokens": tokens}
    return CALL | own | fields


def test_all_that_is_exported_exists():
    assert all(hasattr(saga_sim.traces, name) for name in saga_sim.traces.__all__)


def test_every_format_has_a_sample():
    assert set(FORMAT_OF.values()) == set(FORMATS)
    assert set(FORMAT_OF) == {path.name for path in SAMPLES.iterdir()}


@pytest.mark.parametrize("name", FORMAT_OF)
def test_the_format_is_told_from_the_file(name):
    trace = read_trace([SAMPLES / name])
    check_trace(trace)
    assert trace == read_trace([SAMPLES / name], format=FORMAT_OF[name])
    assert trace.name == name


@pytest.mark.parametrize("name", FORMAT_OF)
def test_a_file_that_is_read_twice_keeps_its_sessions_apart(name):
    once, twice = read_trace([SAMPLES / name]), read_trace([SAMPLES / name] * 2)
    check_trace(twice)
    assert len(twice.sessions) == 2 * len(once.sessions)
    assert twice.sessions[: len(once.sessions)] == once.sessions
    again = twice.sessions[len(once.sessions) :]
    assert [s[0].session_id for s in again] == [f"{s[0].session_id}@2" for s in once.sessions]
    parents = [s[0].parent_session_id for s in once.sessions]
    assert [s[0].parent_session_id for s in again] == [p and f"{p}@2" for p in parents]
    assert twice.name == f"{name} and 1 more"


def test_a_new_name_does_not_meet_an_old_one(tmp_path):
    files = [
        write_lines(tmp_path / name, [saga_call(session_id) for session_id in sessions])
        for name, sessions in (("1.jsonl", ["a"]), ("2.jsonl", ["a", "a@2"]), ("3.jsonl", ["a"]))
    ]
    trace = read_trace(files)
    assert [s[0].session_id for s in trace.sessions] == ["a", "a@3", "a@2", "a@4"]


def test_a_folder_stands_for_its_files_by_name(tmp_path):
    for name in ("b.jsonl", "a.jsonl.gz", "c.json"):
        write_lines(tmp_path / name, [saga_call(name)])
    write_lines(tmp_path / "README.md", ["not a trace"])
    (tmp_path / "more.json").mkdir()
    trace = read_trace([tmp_path])
    assert [s[0].session_id for s in trace.sessions] == ["a.jsonl.gz", "b.jsonl", "c.json"]
    assert trace.name == tmp_path.name


def test_files_of_several_formats_become_one_trace(tmp_path):
    for name in ("kv_cache_tester.jsonl", "spans.json", "lmcache.jsonl"):
        shutil.copy(SAMPLES / name, tmp_path)
    trace = read_trace([tmp_path], block_tokens=64)
    check_trace(trace)
    assert trace.clock == "session"
    assert len(trace.sessions) == 3 + 2 + 1
    assert len(trace.notes) == 2


@pytest.mark.parametrize(
    ("name", "alone", "with_another"),
    [
        ("kv_cache_tester.jsonl", "session", "session"),
        ("mooncake.jsonl", "shared", "session"),
        ("lmcache.jsonl", "shared", "session"),
        ("saga.jsonl", "shared", "session"),
        ("spans.json", "shared", "shared"),
    ],
)
def test_clocks_of_several_files_compare_only_in_world_time(name, alone, with_another):
    assert read_trace([SAMPLES / name]).clock == alone
    assert read_trace([SAMPLES / name] * 2).clock == with_another


def test_world_time_counts_from_the_earliest_call_of_all_files():
    trace = read_trace([SAMPLES / "spans.json", SAMPLES / "otlp.jsonl"])
    starts = {s[0].session_id: s[0].arrival_s for s in trace.sessions}
    assert starts == {"lead": 0.0, "helper": 3.0, "chat-1": 69_860_799.0}


def test_recorded_ids_count_per_file(tmp_path):
    first = write_lines(tmp_path / "1.jsonl", [saga_call("a", [0, 1])])
    second = write_lines(tmp_path / "2.jsonl", [saga_call("b", [1, 0])])
    trace = read_trace([first, second])
    check_trace(trace)
    assert [ids_of(s[0]) for s in trace.sessions] == [[0, 1], [3, 2]]


@pytest.mark.parametrize(
    ("name", "recorded"),
    [
        ("kv_cache_tester.jsonl", 64),
        ("mooncake.jsonl", 512),
        ("bailian.jsonl", 16),
        ("saga.jsonl", 32),
    ],
)
def test_recorded_blocks_keep_their_size(name, recorded):
    assert read_trace([SAMPLES / name], block_tokens=recorded).block_tokens == recorded
    wanted = rf"{name}:1: has blocks of {recorded} tokens; expected 48"
    with pytest.raises(TraceError, match=wanted):
        read_trace([SAMPLES / name], block_tokens=48)


@pytest.mark.parametrize("name", ["lmcache.jsonl", "spans.json"])
def test_text_is_cut_into_blocks_of_the_size_that_is_asked_for(name):
    assert read_trace([SAMPLES / name]).block_tokens == 64
    trace = read_trace([SAMPLES / name], block_tokens=4)
    check_trace(trace)
    call = trace.sessions[0][0]
    assert trace.block_tokens == 4
    assert call.num_blocks == call.input_tokens // 4 > 0


def test_blocks_of_two_sizes_do_not_mix():
    with pytest.raises(TraceError, match=r"bailian\.jsonl: has blocks of 16 tokens, but .*512"):
        read_trace([SAMPLES / "mooncake.jsonl", SAMPLES / "bailian.jsonl"])


def test_an_unknown_format_names_those_that_are_known(tmp_path):
    message = error_of(tmp_path / "a.jsonl", [{"x": 1, "y": 2}])
    assert message.startswith("a.jsonl:1: is of no known format: its fields are x, y; expected ")
    assert all(f"{name} (" in message for name in FORMATS)


def test_an_object_without_fields_is_of_no_known_format(tmp_path):
    assert "its fields are none; expected" in error_of(tmp_path / "a.jsonl", [{}])


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_format_than_asked_for(tmp_path, name):
    message = error_of(tmp_path / "a.jsonl", [{"x": 1}], format=name)
    assert message.startswith("a.jsonl:1: ")
    assert "is missing" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "csv"}, "format is 'csv'; expected auto, saga, kv-cache-tester"),
        ({"block_tokens": 0}, "block_tokens is 0; expected 1 or more"),
    ],
)
def test_settings_that_are_wrong(settings, message):
    with pytest.raises(TraceError, match=message):
        read_trace([SAMPLES / "saga.jsonl"], **settings)


def test_nothing_to_read(tmp_path):
    with pytest.raises(TraceError, match="no files are named; expected one at least"):
        read_trace([])
    with pytest.raises(
        TraceError, match=r"holds no traces; expected \*\.json, \*\.jsonl or \*\.gz"
    ):
        read_trace([tmp_path])
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace([tmp_path / "none.jsonl"])
    write_lines(tmp_path / "a.jsonl", [{"saga_trace": 1}])
    with pytest.raises(TraceError, match="holds no calls"):
        read_trace([tmp_path])


@pytest.mark.parametrize("name", FORMAT_OF)
def test_what_was_read_can_be_written_and_read_again(tmp_path, name):
    trace = read_trace([SAMPLES / name])
    write_trace(trace, tmp_path / "own.jsonl.gz")
    again = read_trace([tmp_path / "own.jsonl.gz"])
    assert (again.block_tokens, again.sessions) == (trace.block_tokens, trace.sessions)
    assert (again.clock, again.notes) == (trace.clock, trace.notes)
