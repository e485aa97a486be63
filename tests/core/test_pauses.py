"""What the worker learns of pauses, with and without hints."""

import math
import random
from collections import defaultdict

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.durations import PRIOR_P95_S
from saga_core.pauses import PauseModel, Step
from saga_core.reuse import age_bucket
from saga_core.types import Pause, ToolType

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
BASH = Pause(1.0, 1.0, tool_name="bash")
HOUR = Pause(1.0, 1.0, pause_p50_s=3600.0)
MINUTE = Pause(1.0, 1.0, pause_p50_s=60.0)  # The unit of forecasts: its ages are seconds.


def pauses(model, gaps_s, *, session="s", start_s=0.0, step=None, pause=None):
    """Steps of one session with these pauses between them; returns the time and the last wait."""
    now_s = start_s
    for gap_s in gaps_s:
        wait = model.paused(session, step or Step(), now_s=now_s, pause=pause)
        now_s += gap_s
        model.read(wait, now_s=now_s, session_id=session)
    return now_s, model.paused(session, step or Step(), now_s=now_s, pause=pause)


def settled(model, now_s):
    """Let what was learned count: tables are made anew every 30 s."""
    model.paused("clock", Step(), now_s=now_s + 31.0)
    return now_s + 31.0


def test_kinds_of_answers_are_told_apart():
    model = PauseModel()
    now_s = 0.0
    for number in range(60):
        quick, slow = f"q{number}", f"s{number}"
        now_s, _ = pauses(model, [2.0], session=quick, start_s=now_s, step=Step(ending="tool"))
        now_s, _ = pauses(model, [300.0], session=slow, start_s=now_s, step=Step(ending="text"))
    now_s = settled(model, now_s)
    tool = model.paused("a", Step(ending="tool"), now_s=now_s)
    text = model.paused("b", Step(ending="text"), now_s=now_s)
    assert model.worth(tool, now_s=now_s) > 5 * model.worth(text, now_s=now_s)
    later_s = now_s + 200.0
    assert model.worth(tool, now_s=later_s) < model.worth(text, now_s=later_s)


def test_long_steps_and_long_prompts_are_told_apart():
    model = PauseModel()
    for number in range(400):
        step = Step(input_tokens=100 + number, run_s=0.1 + 0.01 * number)
        model.paused(f"s{number}", step, now_s=0.2 * number)
    now_s = settled(model, 80.0)
    steps = (Step(0, 0.0), Step(300, 2.1), Step(300, 9.0), Step(900, 9.0))
    classes = [model.paused("s", step, now_s=now_s).plain.cls for step in steps]
    assert [cls[:3] for cls in classes] == [("paused", None, "new")] * 4
    # Quarters of the times, fifths of the lengths.
    assert [cls[3:] for cls in classes] == [(0, 0), (2, 2), (3, 2), (3, 4)]


def test_rare_endings_share_a_class():
    model = PauseModel()
    for number in range(2000):
        model.paused(f"s{number}", Step(ending="tool"), now_s=0.0)
        wait = model.paused(f"r{number}", Step(ending=number), now_s=0.0)
    assert wait.plain.cls[1] == "rare"
    assert model.paused("x", Step(ending="tool"), now_s=0.0).plain.cls[1] == "tool"
    assert len(model._endings) <= 513


def test_a_sessions_habit_is_known_after_two_pauses():
    model = PauseModel()
    now_s = 0.0
    for number in range(50):
        now_s, _ = pauses(model, [10.0], session=f"s{number}", start_s=now_s)
    first = model.paused("slow", Step(), now_s=now_s)
    assert first.plain.cls[2] == "new"
    _, once = pauses(model, [10.0], session="once", start_s=now_s)
    _, twice = pauses(model, [10.0] * 2, session="twice", start_s=now_s)
    assert once.plain.cls[2] == "new"
    assert twice.plain.cls[2] in {"1", "2"}
    now_s, wait = pauses(model, [200.0] * 6, session="slow", start_s=now_s)
    assert wait.plain.cls[2] == "3"
    now_s, wait = pauses(model, [0.5] * 20, session="slow", start_s=now_s)
    assert wait.plain.cls[2] == "0"


def test_a_hint_told_later_keeps_the_age():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    model.told("s", wait, Pause(1.0, 1.0, tool_name="bash"), now_s=7.0)
    assert wait.hint.cls[:3] == ("tool", "rare" if wait.plain.cls[1] == "rare" else None, "bash")
    assert wait.hint.since_s == 0.0
    assert model.view(wait) is wait.hint


@pytest.mark.parametrize(
    ("pause", "kind"),
    [
        (BASH, "tool"),
        (MINUTE, "forecast"),
        (Pause(1.0, 1.0, tool_name="bash", pause_p50_s=5.0), "forecast"),
        (Pause(1.0, 1.0), None),
    ],
)
def test_what_is_said_decides_the_kind_of_hint(pause, kind):
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0, pause=pause)
    assert (wait.hint.cls[0] if wait.hint else None) == kind


def test_the_latest_word_counts():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0, pause=BASH)
    model.told("s", wait, MINUTE, now_s=1.0)
    assert wait.hint.cls == ("forecast",)
    model.announced(wait, now_s=2.0)
    assert (wait.hint.cls, wait.hint.since_s) == (("announced",), 2.0)
    model.ended(wait, now_s=3.0)
    assert (wait.hint.cls, wait.hint.since_s) == (("ended",), 3.0)
    model.told("s", wait, BASH, now_s=4.0)
    assert (wait.hint.cls[0], wait.hint.since_s) == ("tool", 0.0)


def test_the_same_word_again_changes_nothing():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0, pause=BASH)
    hint = wait.hint
    model.told("s", wait, BASH, now_s=5.0)
    assert wait.hint is hint
    assert hint.counted_s == 0.0


def test_nothing_can_be_said_of_a_wait_that_is_over():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    model.read(wait, now_s=1.0, session_id="s")
    tables = {cls: list(table.reads) for cls, table in model._hazards._tables.items()}
    model.told("s", wait, BASH, now_s=2.0)
    model.announced(wait, now_s=3.0)
    model.ended(wait, now_s=4.0)
    assert wait.hint is None
    assert {cls: table.reads for cls, table in model._hazards._tables.items()} == tables


def test_a_told_end_makes_a_wait_nearly_worthless():
    model = PauseModel()
    wait, other = (model.paused(s, Step(), now_s=0.0) for s in "ab")
    model.ended(wait, now_s=1.0)
    assert model.worth(wait, now_s=1.0) < 0.05 * model.worth(other, now_s=1.0)


def test_ends_that_are_wrong_are_soon_ignored():
    model = PauseModel()
    now_s = 0.0
    for _ in range(200):
        wait = model.paused("s", Step(), now_s=now_s)
        model.ended(wait, now_s=now_s)
        now_s += 5.0
        model.read(wait, now_s=now_s, session_id="s")
    wait, plain = (model.paused(s, Step(), now_s=now_s) for s in ("s", "s"))
    model.ended(wait, now_s=now_s)
    assert model.view(wait) is wait.plain
    assert model.worth(wait, now_s=now_s) == model.worth(plain, now_s=now_s)


def test_false_ends_teach_the_ended_class():
    model = PauseModel()
    before = model._hazards.worth(("ended",), 4.9)
    now_s = 0.0
    for _ in range(20):
        wait = model.paused("s", Step(), now_s=now_s)
        model.ended(wait, now_s=now_s)
        now_s += 5.0
        model.read(wait, now_s=now_s, session_id="s")
    settled(model, now_s)
    assert model._hazards.worth(("ended",), 4.9) > 50 * before
    assert sum(model._hazards._tables["ended",].reads) == 20.0


def test_right_ends_are_trusted():
    model = PauseModel()
    now_s = 0.0
    for number in range(300):
        now_s, last = pauses(model, [5.0] * 4, session=f"s{number}", start_s=now_s)
        model.ended(last, now_s=now_s)
    now_s += 8000.0
    for _ in range(30):
        model.left("plain", now_s=now_s)
    assert model._trust._scores["ended"] > 20.0
    # A wait of which nothing is said keeps what such waits are worth.
    wait = model.paused("x", Step(), now_s=now_s)
    before = model.worth(wait, now_s=now_s)
    model.ended(wait, now_s=now_s)
    assert model.worth(wait, now_s=now_s) < 0.05 * before


def test_what_a_session_left_behind_is_worth_little_until_it_is_read():
    model = PauseModel()
    fresh = model.left("superseded", now_s=0.0)
    assert fresh.plain.cls == ("superseded",)
    plain = model.worth(model.left("plain", now_s=0.0), now_s=0.0)
    assert model.worth(fresh, now_s=0.0) == pytest.approx(0.05 * plain)
    for _ in range(30):
        model.read(model.left("superseded", now_s=0.0), now_s=2.0)
    settled(model, 2.0)
    assert model.worth(model.left("superseded", now_s=40.0), now_s=41.9) > plain


def test_random_tool_names_are_soon_ignored_and_right_ones_kept():
    seconds = {"quick": 1.0, "slow": 60.0}
    for is_right in (True, False):
        rng = random.Random(1)
        model = PauseModel()
        now_s = 0.0
        for _ in range(600):
            tool = rng.choice(sorted(seconds))
            said = tool if is_right else rng.choice(sorted(seconds))
            wait = model.paused("s", Step(), now_s=now_s, pause=Pause(1.0, 1.0, tool_name=said))
            now_s += seconds[tool] * rng.lognormvariate(0.0, 0.3)
            model.read(wait, now_s=now_s, session_id="s")
        score = model._trust._scores["tool"]
        assert (score > 20.0) if is_right else (score < 10.0)


def test_forecasts_share_a_table_in_units_of_the_forecast():
    model = PauseModel()
    now_s = 0.0
    rng = random.Random(2)
    for _ in range(400):
        p50_s = rng.choice([5.0, 500.0])
        pause = Pause(1.0, 1.0, pause_p50_s=p50_s)
        wait = model.paused("s", Step(), now_s=now_s, pause=pause)
        now_s += p50_s * rng.lognormvariate(0.0, 0.2)
        model.read(wait, now_s=now_s, session_id="s")
    now_s = settled(model, now_s)
    short, long = (
        model.paused(s, Step(), now_s=now_s, pause=Pause(1.0, 1.0, pause_p50_s=p50_s))
        for s, p50_s in (("a", 5.0), ("b", 500.0))
    )
    at_peak, overdue = now_s + 4.0, now_s + 50.0
    assert model.worth(short, now_s=at_peak) > 20 * model.worth(long, now_s=at_peak)
    assert model.worth(short, now_s=overdue) < model.worth(short, now_s=at_peak) / 20
    # A never-seen forecast is as good as the others: 0.8 of the way is 0.8 of the way.
    third = model.paused("c", Step(), now_s=now_s, pause=Pause(1.0, 1.0, pause_p50_s=50.0))
    worth = model.worth(third, now_s=now_s + 40.0)
    assert worth == pytest.approx(model.worth(short, now_s=at_peak) / 10, rel=1e-6)


@pytest.mark.parametrize("p50_s", [5.0, 60.0, 600.0])
def test_a_forecasts_table_counts_in_its_minutes(p50_s):
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0, pause=Pause(1.0, 1.0, pause_p50_s=p50_s))
    model.read(wait, now_s=2.5 * p50_s)
    table = model._hazards._tables["forecast",]
    assert sum(table.risk_s) == pytest.approx(150.0)
    assert table.reads[age_bucket(150.0)] == 1.0


def test_an_announced_return_is_as_good_as_a_read_for_the_hint_before():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0, pause=BASH)
    model.announced(wait, now_s=100.0)
    model.read(wait, now_s=101.0)
    tool, announced, plain = (
        model._hazards._tables[kind,] for kind in ("tool", "announced", "paused")
    )
    assert [sum(table.risk_s) for table in (tool, announced, plain)] == [100.0, 1.0, 101.0]
    assert tool.reads[age_bucket(100.0)] == 1.0
    assert announced.reads[age_bucket(1.0)] == 1.0
    assert [sum(table.reads) for table in (tool, announced, plain)] == [1.0, 1.0, 1.0]


def test_a_tool_end_announces_the_next_step():
    model = PauseModel()
    now_s = 0.0
    for number in range(100):
        wait = model.paused(f"s{number}", Step(), now_s=now_s)
        model.announced(wait, now_s=now_s + 100.0)
        now_s += 100.5
        model.read(wait, now_s=now_s)
    now_s = settled(model, now_s)
    wait = model.paused("new", Step(), now_s=now_s)
    before = model.worth(wait, now_s=now_s + 50.0)
    model.announced(wait, now_s=now_s + 50.0)
    assert model.worth(wait, now_s=now_s + 50.0) > 10 * before


def test_a_second_announcement_says_nothing_new():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    for now_s in (10.0, 11.0, 15.0):
        model.announced(wait, now_s=now_s)
    model.read(wait, now_s=20.0)
    table = model._hazards._tables["announced",]
    assert (sum(table.reads), sum(table.risk_s)) == (1.0, 10.0)


def test_a_wait_that_is_never_read_counts_for_two_hours():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    for number in range(400):
        model.left("plain", now_s=30.0 * number)
    assert wait.is_over
    risk_s = sum(model._hazards._tables["paused",].risk_s)
    assert 7200.0 <= risk_s <= 7700.0
    assert model.p_reuse(model.paused("t", Step(), now_s=12_000.0)) == pytest.approx(9 / 11)


def test_a_wait_that_was_said_to_be_over_is_missed_once():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    model.ended(wait, now_s=1.0)
    for number in range(400):
        model.left("plain", now_s=30.0 * number)
    assert wait.is_over
    assert model.p_reuse(model.paused("t", Step(), now_s=12_000.0)) == pytest.approx(9 / 11)


def test_a_read_after_two_hours_teaches_nothing():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    for number in range(400):
        model.left("plain", now_s=30.0 * number)
    model.read(wait, now_s=12_000.0, session_id="s")
    assert sum(model._hazards._tables["paused",].reads) == 0.0
    assert model._habits["s"].pauses == 0


EVENT = st.sampled_from(
    ["paused", "paused", "superseded", "told", "forecast", "announced", "ended", "read"]
)
GAP_S = st.sampled_from([0.0, 0.01, 0.3]) | st.floats(0.0, 60.0)


@PROPERTY
@given(st.lists(st.tuples(EVENT, st.integers(0, 1), GAP_S), min_size=20, max_size=80))
def test_idle_time_is_counted_once(events):
    model, now_s = PauseModel(), 0.0
    waits = {}
    since_s, hinted = {}, {}  # of what runs now: when it began; which hint, and when it came
    expected_s = defaultdict(float)

    def close_hint(slot):
        if slot in hinted:
            kind, from_s = hinted.pop(slot)
            expected_s[kind] += now_s - from_s

    def close(slot):
        if slot in waits:
            close_hint(slot)
            expected_s[waits[slot].plain.cls[0]] += now_s - since_s.pop(slot)
            model.read(waits.pop(slot), now_s=now_s, session_id=f"s{slot}")

    for event, slot, gap_s in events:
        now_s += gap_s
        if event in ("paused", "superseded"):
            close(slot)
            waits[slot] = (
                model.paused(f"s{slot}", Step(), now_s=now_s)
                if event == "paused"
                else model.left(event, now_s=now_s)
            )
            since_s[slot] = now_s
        elif event == "read":
            close(slot)
        elif slot in waits and waits[slot].plain.cls[0] == "paused":
            kind = {"told": "tool"}.get(event, event)
            if hinted.get(slot, ("", 0.0))[0] != kind:
                close_hint(slot)
                hinted[slot] = (kind, now_s)
            if event == "told":
                model.told(f"s{slot}", waits[slot], BASH, now_s=now_s)
            elif event == "forecast":
                model.told(f"s{slot}", waits[slot], MINUTE, now_s=now_s)
            else:
                getattr(model, event)(waits[slot], now_s=now_s)
    now_s += 100.0
    for slot in sorted(waits):
        close(slot)

    tables = model._hazards._tables
    counted_s = {cls[0]: sum(table.risk_s) for cls, table in tables.items() if len(cls) == 1}
    for kind in expected_s.keys() | counted_s.keys():
        assert counted_s.get(kind, 0.0) == pytest.approx(expected_s[kind], abs=1e-6), kind


@PROPERTY
@given(st.floats(0.0, 2000.0), st.floats(0.0, 1.0), st.sampled_from([None, BASH, MINUTE, HOUR]))
def test_worth_stays_as_it_is_until_the_stated_time(age_s, part, pause):
    model = PauseModel()
    since_s, wait = pauses(model, [1.0, 40.0, 3.0, 900.0] * 5)
    now_s = since_s
    if pause is not None:
        model.told("s", wait, pause, now_s=now_s)
        assert model.view(wait) is wait.hint
    now_s = settled(model, now_s)
    now_s = max(now_s, since_s + age_s)
    until_s = model.worth_until_s(wait, now_s=now_s)
    assert until_s > now_s - 1e-9
    later_s = now_s + part * (min(until_s, 1e5) - now_s - 1e-6)
    if later_s > now_s:
        assert model.worth(wait, now_s=later_s) == model.worth(wait, now_s=now_s)
    assert model.worth_until_s(wait, now_s=until_s + 1e-6) > until_s or until_s == math.inf


def test_a_wait_is_read_once():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    for _ in range(3):
        model.read(wait, now_s=10.0, session_id="s")
    assert sum(model._hazards._tables["paused",].reads) == 1.0
    assert sum(model._hazards._tables["paused",].risk_s) == pytest.approx(10.0)


def test_p95_is_that_of_the_kind_of_pause():
    model = PauseModel()
    _, wait = pauses(model, [20.0] * 40, step=Step(ending="tool"))
    assert model.p95_s(wait) == pytest.approx(20.0, rel=0.02)


def test_a_named_tool_brings_its_own_p95_and_p_reuse():
    model = PauseModel()
    told = model.paused("s", Step(), now_s=0.0, pause=BASH)
    assert model.p95_s(told) == PRIOR_P95_S[ToolType.CODE_EXEC]
    assert model.p95_s(model.paused("t", Step(), now_s=0.0)) == PRIOR_P95_S[ToolType.OTHER]
    now_s, _ = pauses(model, [20.0] * 10, pause=BASH)
    settled(model, now_s)
    told = model.paused("s", Step(), now_s=now_s, pause=BASH)
    assert model.p95_s(told) == pytest.approx(20.0, rel=0.021)
    model.read(told, now_s=now_s + 1.0, share=0.5)
    other = model.paused("t", Step(), now_s=now_s, pause=BASH)
    assert model.p_reuse(other) == pytest.approx((9 + 10.5) / (10 + 11))


def test_everything_is_bounded():
    model = PauseModel(max_sessions=50)
    for number in range(3000):
        model.paused(f"s{number}", Step(ending=number, input_tokens=number), now_s=0.01 * number)
    assert len(model._habits) == 50
    assert len(list(model.waits())) <= 100


def test_tool_names_are_bounded():
    model = PauseModel(max_sessions=50)
    for number in range(12_000):
        pause = Pause(1.0, 1.0, tool_name=f"t{number}")
        wait = model.paused("s", Step(), now_s=float(number), pause=pause)
        model.p95_s(wait)
        model.read(wait, now_s=number + 0.5, session_id="s")
    assert len(model._hazards._tables) <= 8192
    assert len(model._durations._quantiles) <= 10_000
    assert len(model._p95_s) <= 31


def test_waits_that_are_too_many_to_watch_can_still_be_ranked():
    model = PauseModel(max_sessions=10)
    waits = [model.paused(f"s{number}", Step(), now_s=0.0) for number in range(50)]
    assert [wait.is_over for wait in waits] == [True] * 30 + [False] * 20
    assert model.worth(waits[0], now_s=1.0) == model.worth(waits[-1], now_s=1.0)
    model.read(waits[0], now_s=5.0, session_id="s0")
    assert sum(model._hazards._tables["paused",].reads) == 0.0


def test_equal_events_teach_the_same():
    def taught():
        rng = random.Random(3)
        model, now_s = PauseModel(), 0.0
        for number in range(300):
            step = Step(rng.randrange(1000), rng.random(), rng.choice("ab"))
            wait = model.paused(f"s{number % 7}", step, now_s=now_s)
            now_s += rng.expovariate(0.1)
            model.read(wait, now_s=now_s, session_id=f"s{number % 7}", share=rng.random())
        wait = model.paused("s0", Step(5, 0.5, "a"), now_s=now_s)
        return [model.worth(wait, now_s=now_s + age_s) for age_s in (0.0, 1.0, 30.0, 900.0)]

    assert taught() == taught()
    assert all(math.isfinite(worth) and worth > 0.0 for worth in taught())


def test_the_outlook_of_a_regular_pause_is_its_length():
    model = PauseModel()
    for number in range(40):
        wait = model.paused("s", Step(), now_s=100.0 * number)
        model.read(wait, now_s=100.0 * number + 10.0, session_id="s")
    wait = model.paused("s", Step(), now_s=4000.0)
    outlook = model.outlook(wait, now_s=4000.0)
    assert outlook.p_next > 0.9
    assert 4006.0 < outlook.early_s <= outlook.expected_s < 4013.0
    assert outlook.p_soon < 0.1
    assert model.outlook(wait, now_s=4006.0).p_soon > 0.6
    overdue = model.outlook(wait, now_s=4060.0)
    assert overdue.early_s >= 4060.0
    assert overdue.p_next < outlook.p_next


def test_a_forecast_sets_the_outlook():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    model.told("s", wait, Pause(0.9, 60.0, pause_p50_s=30.0), now_s=0.0)
    soon = model.paused("t", Step(), now_s=0.0)
    model.told("t", soon, Pause(0.9, 60.0, pause_p50_s=0.3), now_s=0.0)
    late_s = model.outlook(wait, now_s=0.0).expected_s
    assert late_s == pytest.approx(100 * model.outlook(soon, now_s=0.0).expected_s)
