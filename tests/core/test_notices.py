"""The notices codec: what is written is read the same, what is malformed names its field."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.errors import NoticeError
from saga_core.notices import (
    MAX_NOTICES,
    VERSION,
    EndNotice,
    PauseNotice,
    ResumeNotice,
    decode_notices,
    encode_notices,
)
from saga_core.types import Pause

PROPERTY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

session_ids = st.text(min_size=1, max_size=256)
seconds = st.floats(0.0, 86_400.0)
notices = st.one_of(
    st.builds(
        PauseNotice,
        session_ids,
        st.builds(
            Pause,
            st.floats(0.0, 1.0),
            seconds,
            st.none() | st.text(min_size=1, max_size=50),
            st.none() | seconds,
        ),
    ),
    st.builds(ResumeNotice, session_ids, seconds),
    st.builds(EndNotice, session_ids),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=10,
)
# Bodies that are nearly right, so that the reader gets past the first field.
near_bodies = st.fixed_dictionaries(
    {"version": st.just(VERSION)},
    optional={
        "notices": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "kind": st.sampled_from(["pause", "resume_soon", "end"]) | json_values,
                    "session_id": st.text(max_size=300) | json_values,
                    "p_reuse": st.floats() | json_values,
                    "pause_p95_s": st.floats() | json_values,
                    "in_s": st.floats() | json_values,
                    "tool_name": json_values,
                    "pause_p50_s": st.floats() | json_values,
                },
            )
            | json_values,
            max_size=3,
        )
    },
)

PAUSE = {"kind": "pause", "session_id": "s", "p_reuse": 0.5, "pause_p95_s": 2.0}
RESUME = {"kind": "resume_soon", "session_id": "s", "in_s": 1.0}
END = {"kind": "end", "session_id": "s"}
BAD_NUMBERS = [True, False, None, "1", [1], {}, math.nan, math.inf, -math.inf, -0.001, -1]


def body_of(*items, **changes):
    return {"version": VERSION, "notices": list(items), **changes}


@PROPERTY
@given(st.lists(notices, max_size=5))
def test_notices_survive_the_wire(sent):
    assert decode_notices(json.loads(json.dumps(encode_notices(sent)))) == sent


def test_the_body_is_as_documented():
    sent = [PauseNotice("s", Pause(0.5, 2.0, "bash")), ResumeNotice("s", 1.0), EndNotice("s")]
    assert encode_notices(sent) == body_of({**PAUSE, "tool_name": "bash"}, RESUME, END)


def test_a_forecast_is_written_only_when_there_is_one():
    sent = [PauseNotice("s", Pause(0.5, 2.0, "bash", pause_p50_s=1.5))]
    expected = body_of({**PAUSE, "tool_name": "bash", "pause_p50_s": 1.5})
    assert encode_notices(sent) == expected
    assert decode_notices(expected) == sent
    for absent in ({}, {"pause_p50_s": None}):
        assert decode_notices(body_of({**PAUSE, **absent})) == [PauseNotice("s", Pause(0.5, 2.0))]


def test_what_may_be_left_out_has_its_default():
    assert decode_notices(body_of(PAUSE, {"kind": "resume_soon", "session_id": "r"})) == [
        PauseNotice("s", Pause(0.5, 2.0, None)),
        ResumeNotice("r", 0.0),
    ]


def test_unknown_fields_are_passed_over():
    assert decode_notices(body_of({**END, "reason": "done"}, sent_by="a gateway")) == [
        EndNotice("s")
    ]


def test_the_bounds_themselves_are_legal():
    low = {**PAUSE, "p_reuse": 0, "pause_p95_s": 0, "pause_p50_s": 0}
    high = {"p_reuse": 1, "pause_p95_s": 86_400, "pause_p50_s": 86_400, "session_id": "x" * 256}
    assert decode_notices(body_of(low, {**PAUSE, **high})) == [
        PauseNotice("s", Pause(0.0, 0.0, None, 0.0)),
        PauseNotice("x" * 256, Pause(1.0, 86_400.0, None, 86_400.0)),
    ]
    assert len(decode_notices(body_of(*[END] * MAX_NOTICES))) == MAX_NOTICES


@pytest.mark.parametrize(
    ("item", "field", "value"),
    [
        *((item, "session_id", bad) for item in (PAUSE, RESUME, END) for bad in ("", "x" * 257)),
        *((item, "session_id", bad) for item in (PAUSE, RESUME, END) for bad in (None, 1, ["s"])),
        *((PAUSE, "p_reuse", bad) for bad in [*BAD_NUMBERS, 1.001, 10**400]),
        *((PAUSE, "pause_p95_s", bad) for bad in [*BAD_NUMBERS, 86_400.1, 10**400]),
        *(
            (PAUSE, "pause_p50_s", bad)
            for bad in [*BAD_NUMBERS, 86_400.1, 10**400]
            if bad is not None
        ),
        *((RESUME, "in_s", bad) for bad in [*BAD_NUMBERS, 86_400.1, 10**400]),
        *((PAUSE, "tool_name", bad) for bad in (1, True, ["bash"], {}, "", "x" * 257)),
        *((END, "kind", bad) for bad in (None, "", "END", "ended", 1, [], {})),
    ],
)
def test_a_malformed_field_is_named_and_nothing_is_accepted(item, field, value):
    with pytest.raises(NoticeError) as caught:
        decode_notices(body_of(END, PAUSE, {**item, field: value}))
    assert f"notices[2].{field} must be " in str(caught.value)


@pytest.mark.parametrize(
    ("item", "field"),
    [
        (PAUSE, "p_reuse"),
        (PAUSE, "pause_p95_s"),
        (PAUSE, "session_id"),
        (RESUME, "session_id"),
        (END, "session_id"),
        (END, "kind"),
    ],
)
def test_a_missing_field_is_named(item, field):
    without = {name: value for name, value in item.items() if name != field}
    with pytest.raises(NoticeError, match=rf"notices\[0\]\.{field} "):
        decode_notices(body_of(without))


@pytest.mark.parametrize("item", [None, 1, "end", [], [END]])
def test_a_notice_that_is_no_object_is_named(item):
    with pytest.raises(NoticeError, match=r"notices\[1\] must be an object"):
        decode_notices(body_of(END, item))


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "text",
        1,
        {},
        {"notices": []},
        *({"version": bad, "notices": []} for bad in (0, 2, "1", None, [1], True, math.nan)),
    ],
)
def test_another_version_or_no_object_is_refused(body):
    with pytest.raises(NoticeError, match=f'"version": {VERSION}'):
        decode_notices(body)


@pytest.mark.parametrize("items", [None, {}, "[]", 3, [END] * (MAX_NOTICES + 1)])
def test_notices_must_be_a_bounded_list(items):
    with pytest.raises(NoticeError, match=rf'"notices" must be a list of at most {MAX_NOTICES}'):
        decode_notices(body_of(notices=items))


@PROPERTY
@given(json_values | near_bodies)
def test_any_body_is_read_as_legal_notices_or_refused(body):
    try:
        read = decode_notices(body)
    except NoticeError:
        return
    for notice in read:
        assert 1 <= len(notice.session_id) <= 256
        if isinstance(notice, PauseNotice):
            assert 0.0 <= notice.pause.p_reuse <= 1.0
            assert 0.0 <= notice.pause.pause_p95_s <= 86_400.0
            assert 0.0 <= (notice.pause.pause_p50_s or 0.0) <= 86_400.0
        if isinstance(notice, ResumeNotice):
            assert 0.0 <= notice.in_s <= 86_400.0
    assert decode_notices(encode_notices(read)) == read
