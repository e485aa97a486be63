"""The hint headers: what is written is legal, what is read is legal or named as dropped."""

import re
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.hints import HEADERS, MAX_VALUE_CHARS, Decoded, Hints, clean, decode, encode
from saga_core.types import ToolType

PROPERTY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TOKEN = re.compile(r"[A-Za-z0-9._~:-]{1,256}")
TEXT_FIELDS = (
    "workflow_id",
    "task_id",
    "session_id",
    "parent_session_id",
    "node",
    "tool_name",
)
INT_FIELDS = ("step", "deadline_ms")

legal_text = st.text(string.ascii_letters + string.digits + "._~:-", min_size=1, max_size=256)
legal_int = st.integers(0, 10**15 - 1)
legal_hints = st.builds(
    Hints,
    **{name: st.none() | legal_text for name in TEXT_FIELDS},
    **{name: st.none() | legal_int for name in INT_FIELDS},
    tool=st.none() | st.sampled_from(ToolType),
    final=st.booleans(),
)
any_hints = st.builds(
    Hints,
    **{name: st.none() | st.text(max_size=400) for name in TEXT_FIELDS},
    **{name: st.none() | st.integers() for name in INT_FIELDS},
    tool=st.none() | st.sampled_from(ToolType),
    final=st.booleans(),
)
header_names = st.sampled_from([*HEADERS.values(), "baggage", "X-SAGA-Unknown"]).flatmap(
    lambda name: st.sampled_from([name, name.lower(), name.upper()])
)
baggage_values = st.lists(
    st.tuples(
        st.sampled_from(["saga.workflow_id", "saga.task_id", "saga.session_id", "other", ""]),
        st.sampled_from(["=", "", ";", "==", "=;"]),
        st.text(max_size=20),
    ).map("".join)
).map(",".join)
header_lists = st.lists(
    st.tuples(
        header_names | st.text(max_size=20),
        st.text(max_size=300) | baggage_values | legal_text | legal_int.map(str),
    )
)


def assert_legal(hints):
    for name in TEXT_FIELDS:
        value = getattr(hints, name)
        assert value is None or TOKEN.fullmatch(value), name
    for name in INT_FIELDS:
        value = getattr(hints, name)
        assert value is None or (type(value) is int and 0 <= value < 10**15), name
    assert hints.tool is None or isinstance(hints.tool, ToolType)
    assert isinstance(hints.final, bool)


@PROPERTY
@given(legal_hints)
def test_legal_hints_survive_the_wire(hints):
    assert decode(encode(hints).items()) == Decoded(hints, ())


@pytest.mark.parametrize("value", ["-", "-a", "a-", "--a--b--", "a" * 255 + "-", "~:._-"])
def test_a_legal_value_is_sent_as_it_is(value):
    assert clean(value) == value
    assert encode(Hints(session_id=value)) == {"X-SAGA-Session-ID": value}


@PROPERTY
@given(any_hints)
def test_whatever_the_hints_the_headers_are_legal_and_none_is_dropped(hints):
    headers = encode(hints)
    assert set(headers) <= set(HEADERS.values())
    for value in headers.values():
        assert TOKEN.fullmatch(value)
    assert decode(headers.items()).dropped == ()


@PROPERTY
@given(st.text(max_size=400))
def test_clean_makes_a_legal_value_once_and_for_all(text):
    cleaned = clean(text)
    if cleaned is None:
        assert not any(TOKEN.fullmatch(char) for char in text if char != "-")
    else:
        assert TOKEN.fullmatch(cleaned)
        assert clean(cleaned) == cleaned


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("my agent", "my-agent"),
        ("a / b", "a-b"),
        (" \tspaced\n", "spaced"),
        ("größe", "gr-e"),
        ("x" * 300, "x" * MAX_VALUE_CHARS),
        ("", None),
        ("日本語", None),
    ],
)
def test_foreign_characters_become_one_dash(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(("field", "value"), [("step", -1), ("deadline_ms", -5), ("step", 10**15)])
def test_a_number_out_of_range_is_not_sent_as_another_number(field, value):
    assert encode(Hints(**{field: value})) == {}


def test_what_is_not_said_is_not_sent():
    assert encode(Hints()) == {}
    assert encode(Hints(step=0, deadline_ms=0)) == {
        "X-SAGA-Step": "0",
        "X-SAGA-Deadline-Ms": "0",
    }
    assert encode(Hints(final=True)) == {"X-SAGA-Final": "1"}


@PROPERTY
@given(header_lists)
def test_any_headers_are_read_without_an_error_to_legal_hints(headers):
    decoded = decode(headers)
    assert_legal(decoded.hints)
    assert set(decoded.dropped) <= set(HEADERS.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, bad) for name in TEXT_FIELDS for bad in ("", "a b", "a/b", "é", "x" * 257)),
        *((name, bad) for name in INT_FIELDS for bad in ("", "-1", "+1", "1.5", "1e3", "0x1")),
        *((name, bad) for name in INT_FIELDS for bad in ("٣", "²", "1_0", "1" * 16, "nan")),
        *(("final", bad) for bad in ("", "2", "yes", "on", "01")),
        *(("tool", bad) for bad in ("", "hammer", "file-io", "file io")),
    ],
)
def test_an_illegal_value_is_dropped_and_its_header_named(field, value):
    headers = [(HEADERS[field].upper(), value), ("X-SAGA-Node", "n"), ("X-SAGA-Task-ID", "t")]
    decoded = decode(headers)
    assert decoded.dropped == (HEADERS[field],)
    rest = {"node": "n", "task_id": "t"}
    if field in rest:  # The second, legal one counts.
        assert getattr(decoded.hints, field) == rest[field]
    else:
        assert getattr(decoded.hints, field) == getattr(Hints(), field)
    assert decoded.hints.task_id == "t"


@pytest.mark.parametrize("change", [str.lower, str.upper, str.title, str.swapcase])
def test_header_names_are_read_in_any_case(change):
    hints = Hints("w", "t", "s", "p", 3, "n", ToolType.HUMAN, "ask", 1000, True)
    headers = [(change(name), value) for name, value in encode(hints).items()]
    assert decode(headers) == Decoded(hints)


@pytest.mark.parametrize(
    ("value", "tool"),
    [
        ("io", ToolType.FILE_IO),
        ("code", ToolType.CODE_EXEC),
        ("web", ToolType.WEB_API),
        ("db", ToolType.DB_QUERY),
        ("DB", ToolType.DB_QUERY),
        ("File_IO", ToolType.FILE_IO),
        *((str(tool), tool) for tool in ToolType),
    ],
)
def test_tools_are_read_by_type_or_alias(value, tool):
    assert decode([("x-saga-tool", value)]).hints.tool is tool


@pytest.mark.parametrize(
    ("value", "final"),
    [("1", True), ("true", True), ("TRUE", True), ("0", False), ("False", False)],
)
def test_final_is_read(value, final):
    assert decode([("x-saga-final", value)]) == Decoded(Hints(final=final))


def test_space_around_a_value_is_not_part_of_it():
    assert decode([("x-saga-step", " 7\t"), ("x-saga-node", " n ")]).hints == Hints(
        step=7, node="n"
    )


def test_the_first_legal_value_of_a_repeated_header_counts():
    headers = [("x-saga-step", "x"), ("x-saga-step", "1"), ("x-saga-step", "2")]
    assert decode(headers) == Decoded(Hints(step=1), ("X-SAGA-Step",))


def test_other_headers_say_nothing():
    assert decode([("x-saga-sessionid", "s"), ("session-id", "s"), ("", "")]) == Decoded(Hints())


def test_headers_win_over_baggage_in_any_order():
    both = [("baggage", "saga.session_id=b,saga.task_id=bt"), ("x-saga-session-id", "h")]
    for headers in (both, both[::-1]):
        assert decode(headers).hints == Hints(session_id="h", task_id="bt")


def test_baggage_stands_in_for_an_illegal_header():
    decoded = decode([("x-saga-task-id", "a b"), ("baggage", "saga.task_id=t")])
    assert decoded == Decoded(Hints(task_id="t"), ("X-SAGA-Task-ID",))


@pytest.mark.parametrize(
    ("baggage", "hints"),
    [
        ("saga.session_id=s", Hints(session_id="s")),
        (" saga.session_id = s ", Hints(session_id="s")),
        ("saga.session_id=s;ttl=3;secure", Hints(session_id="s")),
        ("a=b;c=d, saga.task_id=t ;x=y,saga.workflow_id=w", Hints("w", "t")),
        ("saga.task_id=a%3Ab%2Dc", Hints(task_id="a:b-c")),
        ("saga.task_id=%74%7E", Hints(task_id="t~")),
        ("saga.task_id=first,saga.task_id=second", Hints(task_id="first")),
        ("saga.task_id=a%20b,saga.task_id=ok", Hints(task_id="ok")),
        ("saga.task_id=a%0D%0Ab", Hints()),
        ("saga.task_id=%FF%zz%", Hints()),
        ("saga.task_id=" + "x" * 257, Hints()),
        ("saga.task_id", Hints()),
        ("saga.task_id=;p=1", Hints()),
        ("saga.node=n,saga.step=3", Hints()),
        ("SAGA.task_id=t", Hints()),
        (",,=,;=;", Hints()),
    ],
)
def test_baggage_is_read_as_w3c_writes_it(baggage, hints):
    assert decode([("Baggage", baggage)]) == Decoded(hints)


def test_several_baggage_headers_are_one():
    headers = [("baggage", "saga.task_id=t"), ("baggage", "saga.task_id=u,saga.session_id=s")]
    assert decode(headers).hints == Hints(task_id="t", session_id="s")
