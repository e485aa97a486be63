"""The study: what it measures in each cell, and what it refuses."""

import math
import random
from dataclasses import replace

import pytest

from saga_core.errors import SettingsError
from saga_core.policies import POLICIES
from saga_sim import study
from saga_sim.cache import CacheSimulator
from saga_sim.signals import SIGNALS
from saga_sim.study import SIGNAL_BLIND, CacheStudy, StudyError, StudyOptions
from saga_sim.traces import Call, Trace

BLOCK_TOKENS = 16


def tiny_trace(*, sessions=12, calls=6, clock="session"):
    """Agents with growing prompts over a shared prefix; pauses of a second or of a minute."""
    rng = random.Random(7)
    made = []
    next_id = 4
    for number in range(sessions):
        chain = [range(4)]
        now_s = 5.0 * number if clock == "shared" else 0.0
        session = []
        for _ in range(calls):
            grown = range(next_id, next_id + rng.randint(1, 6))
            next_id = grown.stop
            chain.append(grown)
            input_tokens = sum(map(len, chain)) * BLOCK_TOKENS + 3
            session.append(Call(f"s{number}", now_s, input_tokens, 20, tuple(chain), 1.0))
            now_s += 1.0 + rng.choice((1.0, 60.0))
        made.append(tuple(session))
    return Trace("tiny", BLOCK_TOKENS, tuple(made), clock)


TINY = StudyOptions(
    policies=("prefix-lru", "saga"),
    signals=("none", "all"),
    pressures=(1.5, 3.0),
    seeds=2,
    live_sessions=6.0,
    measured_calls=200,
)


def results_of(options=TINY, **changes):
    return list(CacheStudy(tiny_trace(), replace(options, **changes)).run())


@pytest.fixture(scope="module")
def results():
    return results_of()


def test_results_come_by_seed_then_capacity_then_policy_then_signals(results):
    cells = [(0, 1.5), (0, 3.0), (1, 1.5), (1, 3.0)]
    rows = [("prefix-lru", "none"), ("saga", "none"), ("saga", "all")]
    expected = [(*cell, *row) for cell in cells for row in rows]
    found = [(r.cell.seed, r.cell.pressure, r.policy, r.signals) for r in results]
    assert found == expected
    assert CacheStudy(tiny_trace(), TINY).num_runs == len(results)


def test_equal_studies_give_equal_results(results):
    assert results_of() == results


def test_tokens_add_up(results):
    for result in results:
        cell = result.cell
        for usage in (result.usage, cell.belady, cell.lru):
            assert usage.hit_tokens + usage.prefilled_tokens == cell.input_tokens
            assert usage.loaded_tokens == 0
            assert usage.prefilled_tokens >= cell.first_tokens
        assert cell.capacity_tokens == pytest.approx(cell.footprint_tokens / cell.pressure, rel=0.1)
        assert cell.measured_calls <= cell.calls


def test_figures_follow_from_tokens(results):
    for result in results:
        cell, mine = result.cell, result.usage.prefilled_tokens
        belady, lru = cell.belady.prefilled_tokens, cell.lru.prefilled_tokens
        assert belady < lru
        assert result.total_ratio == mine / belady
        first = cell.first_tokens
        assert result.regen_tokens == mine - first
        assert result.regen_ratio == (mine - first) / (belady - first)
        assert result.gap_closed == (lru - mine) / (lru - belady)
        assert result.hit_rate == pytest.approx(1 - mine / cell.input_tokens)
        assert sum(result.victims.values()) > 0
    assert all(r.gap_closed == 0 for r in results if r.policy == "prefix-lru")


def test_without_a_gap_nothing_is_closed():
    (result,) = results_of(policies=("prefix-lru",), pressures=(0.001,), seeds=1)
    assert result.gap_closed is None
    assert result.regen_ratio is None
    assert result.total_ratio == 1
    assert result.usage.prefilled_tokens == result.cell.first_tokens
    assert result.victims == {}


@pytest.mark.parametrize("policy", sorted(SIGNAL_BLIND))
def test_policies_that_ignore_signals_do(policy, monkeypatch):
    assert policy in POLICIES
    monkeypatch.setattr(study, "SIGNAL_BLIND", frozenset())
    runs = results_of(policies=(policy,), signals=tuple(SIGNALS), pressures=(2.0,), seeds=1)
    assert len(runs) == len(SIGNALS)
    assert len({run.usage for run in runs}) == 1


def test_a_fixed_capacity_takes_the_place_of_the_pressures():
    results = results_of(capacity_blocks=100)
    assert len(results) == 2 * 3
    for result in results:
        assert result.cell.capacity_tokens == 100 * BLOCK_TOKENS
        expected = result.cell.footprint_tokens / result.cell.capacity_tokens
        assert result.cell.pressure == pytest.approx(expected, abs=0.01)


def test_what_the_host_tier_loads_is_not_prefilled(results):
    hosted = results_of(host_blocks=50, host_blocks_per_s=1e6)
    for with_host, without in zip(hosted, results, strict=True):
        usage = with_host.usage
        assert usage.loaded_tokens > 0
        assert usage.hit_tokens + usage.loaded_tokens + usage.prefilled_tokens == (
            with_host.cell.input_tokens
        )
        assert with_host.cell.belady == without.cell.belady
        assert usage.prefilled_tokens < without.usage.prefilled_tokens


def test_a_trace_on_one_clock_keeps_its_arrivals():
    trace = tiny_trace(clock="shared")
    runs = list(CacheStudy(trace, replace(TINY, policies=("prefix-lru",))).run())
    assert all(run.cell.calls == 12 * 6 for run in runs)
    first, second = runs[:2], runs[2:]
    assert [run.usage for run in first] == [run.usage for run in second]


def test_a_policy_better_than_the_optimum_stops_the_study(monkeypatch):
    class Impossible(CacheSimulator):
        def run(self):
            run = super().run()
            depth = self._workload.nodes.depth
            run.hits = [depth[call.node] for call in self._workload.calls]
            return run

    monkeypatch.setattr(study, "CacheSimulator", Impossible)
    with pytest.raises(StudyError, match=r"Bélády beaten: prefix-lru .* bug of the simulator"):
        results_of()


def test_a_trace_without_blocks_leaves_nothing_to_measure():
    call = Call("s", 0.0, 0, 1, (), 1.0)
    with pytest.raises(StudyError, match="leaves nothing to measure"):
        list(CacheStudy(Trace("empty", 16, ((call,),)), TINY).run())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": ("best",)}, "unknown policy 'best'; choose from .*saga"),
        ({"signals": ("loud",)}, "unknown signals 'loud'; choose from none, close"),
        ({"policies": ()}, "policies are empty"),
        ({"signals": ("none", "none")}, "signals name one twice"),
        ({"pressures": (1.0, 0.0)}, "pressure 0 must be above 0"),
        ({"pressures": (-2.0,)}, "pressure -2 must be above 0"),
        ({"pressures": (math.nan,)}, "pressure nan must be above 0"),
        ({"seeds": 0}, "seeds=0 must be at least 1"),
        ({"measured_calls": 0}, "measured_calls=0 must be at least 1"),
        ({"live_sessions": 0.0}, "live_sessions=0 must be above 0"),
        ({"capacity_blocks": 0}, "capacity_blocks=0 must be above 0"),
        ({"host_blocks": 5}, "host_blocks and host_blocks_per_s go together"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        replace(TINY, **changes)
