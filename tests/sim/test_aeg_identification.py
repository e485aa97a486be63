"""Sessions and tasks by content alone: made conversations and recorded plain text."""

from collections import Counter
from dataclasses import replace

import pytest

from saga_core.prompts import PromptReader
from saga_sim.aeg.conversations import Habits, generate
from saga_sim.aeg.exchanges import Exchange, in_time
from saga_sim.aeg.identification import read_flat, replay, sessions, tasks

READER = PromptReader(b"test")


@pytest.fixture(scope="module")
def made():
    return generate(0)


@pytest.fixture(scope="module")
def told(made):
    return replay(made)


def messages_of(exchanges):
    return [each.body["messages"] for each in exchanges]


def test_made_conversations_do_what_clients_do(made):
    assert made == generate(0) != generate(1)
    assert len({each.owner for each in made if each.parent is None}) == 200
    assert len({each.name for each in made}) == len(made)
    openings = Counter(m[1]["content"] for m in messages_of(made) if len(m) == 2)
    assert sum(count > 10 for count in openings.values()) == 2
    assert sum(not each.is_answered for each in made) > 50
    assert len({each.owner for each in made if each.parent is not None}) > 30
    assert len({m[0]["content"] for m in messages_of(made)}) > 100
    calls = [call for m in messages_of(made) for each in m for call in each.get("tool_calls", ())]
    assert {"\n" in call["function"]["arguments"] for call in calls} == {True, False}
    running = [(each.start_s, 1) for each in made] + [(each.end_s, -1) for each in made]
    running.sort()
    assert max(sum(step for _, step in running[:n]) for n in range(0, len(running), 100)) > 20


def test_a_made_prompt_holds_the_answers_before_it(made):
    """Whatever way the client writes their arguments."""
    plain = Habits(0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    before: dict[str, Exchange] = {}
    for each in generate(3, 20, plain):
        pieces = READER.read("chat", each.body).pieces
        last = before.get(each.owner)
        if last is not None:
            answer = READER.answer(last.answer, last.calls)
            known = READER.read("chat", last.body).pieces
            assert pieces[: len(known) + len(answer)] == (*known, *answer)
        before[each.owner] = each


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_made_conversations_are_separated(seed):
    score = sessions(replay(generate(seed)))
    assert score.owners > 200
    assert score.precision >= 0.98
    assert score.recall >= 0.98
    assert score.merged == 0
    assert score.right_forks >= 0.9 * score.forks > 0
    assert set(score.relations) == {"new", "continues", "retry", "supersedes", "fork"}


def test_what_cannot_be_told_apart_is_not_scored(told):
    score = sessions(told)
    assert 20 < score.requests - score.scored < 100


def test_strangers_share_no_task(told):
    score = tasks(told, with_links=True)
    assert score.owners == 200
    assert score.precision >= 0.98
    assert score.recall >= 0.98


def test_without_links_a_task_is_its_branches(told):
    score = tasks(told, with_links=False)
    assert score.precision == 1.0
    assert score.recall > sessions(told).recall - 0.01


def test_a_score_sees_mistakes(told):
    one = [replace(each, match=replace(each.match, session_id="one")) for each in told]
    merged = sessions(one)
    assert merged.precision < 0.02
    assert (merged.recall, merged.merged, merged.groups) == (1.0, 1, 1)
    own = [
        replace(each, match=replace(each.match, session_id=str(n))) for n, each in enumerate(told)
    ]
    split = sessions(own)
    assert (split.precision, split.recall, split.purity) == (1.0, 0.0, 1.0)


def test_events_are_in_time_and_answers_come_first():
    first = Exchange("a", "o", 0.0, 2.0, "chat", {})
    second = Exchange("b", "o", 2.0, 3.0, "chat", {})
    events = [(e.now_s, e.is_start, e.exchange.name) for e in in_time([second, first])]
    assert events == [(0.0, True, "a"), (2.0, False, "a"), (2.0, True, "b"), (3.0, False, "b")]


@pytest.fixture(scope="module")
def recorded(traces):
    """By source, how recordings that overlap were told."""
    return {
        name: replay(read_flat((traces / "lmcache_dev").glob(f"{name}_*"), 30.0, 1))
        for name in ("miniswe", "magagent", "taubench")
    }


@pytest.mark.parametrize("with_links", [False, True])
def test_tasks_of_mini_swe(recorded, with_links):
    score = tasks(recorded["miniswe"], with_links=with_links)
    assert (score.requests, score.scored, score.owners) == (201, 201, 10)
    assert score.purity >= 0.95
    assert score.recall >= 0.95
    assert score.merged == 0


@pytest.mark.parametrize(("name", "least_recall"), [("magagent", 0.1), ("taubench", 0.6)])
def test_tasks_of_several_agents(recorded, name, least_recall):
    """Agents whose prompts leave out what was answered: links find more, at little cost."""
    alone = tasks(recorded[name], with_links=False)
    linked = tasks(recorded[name], with_links=True)
    assert alone.merged == 0
    assert linked.scored < linked.requests
    assert linked.purity >= 0.95
    assert linked.recall >= least_recall > alone.recall
