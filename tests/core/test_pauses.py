"""What the worker learns of pauses, with and without hints."""

import math
import random

import pytest

from saga_core.pauses import PauseModel, Step
from saga_core.types import Pause


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


def test_a_wait_that_is_never_read_counts_for_two_hours():
    model = PauseModel()
    wait = model.paused("s", Step(), now_s=0.0)
    for number in range(400):
        model.left("plain", now_s=30.0 * number)
    assert wait.is_over
    risk_s = sum(model._hazards._tables["paused",].risk_s)
    assert 7200.0 <= risk_s <= 7700.0
    assert model.p_reuse(model.paused("t", Step(), now_s=12_000.0)) == pytest.approx(9 / 11)


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


def test_everything_is_bounded():
    model = PauseModel(max_sessions=50)
    for number in range(3000):
        model.paused(f"s{number}", Step(ending=number, input_tokens=number), now_s=0.01 * number)
    assert len(model._habits) == 50
    assert len(model._uncounted) <= 100


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
