"""Which session a request continues, by what it says alone."""

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saga_core.conversations import Conversations, Kind, Piece, Relation

PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
SCOPE = 1
OPENINGS = ("fix the failing test in the parser", "write a report about tides and harbours")


def piece(kind, text):
    digest = int.from_bytes(blake2b(f"{kind} {text}".encode(), digest_size=8).digest())
    return Piece(digest, len(text), kind)


def system(text="you are a careful agent"):
    return piece(Kind.SYSTEM, text)


def user(text):
    return piece(Kind.USER, text)


def assistant(text):
    return piece(Kind.ASSISTANT, text)


def tool(text):
    return piece(Kind.TOOL, text)


def table(max_sessions=1000):
    numbers = itertools.count()
    return Conversations(max_sessions, lambda: f"s{next(numbers)}")


def turn(conversations, prompt, answer=None, scope=SCOPE):
    """A request that is answered; returns its match."""
    match = conversations.arrived(scope, prompt)
    conversations.answered(match.session_id, [answer] if answer is not None else [])
    conversations.check_integrity()
    return match


ONE, TWO = assistant("let me look at the parser first"), assistant("the tides come twice a day")
RESULT = tool("def parse(text): return text.split()")


def test_a_request_that_adds_to_all_that_was_said_continues():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    assert (first.relation, first.parent_id) == (Relation.NEW, None)
    second = turn(conversations, [*prompt, ONE, RESULT], TWO)
    assert second.session_id == first.session_id
    assert (second.relation, second.known_pieces) == (Relation.CONTINUES, 3)
    third = turn(conversations, [*prompt, ONE, RESULT, TWO, user("go on with that, please")])
    assert (third.session_id, third.known_pieces) == (first.session_id, 5)


def test_equal_openings_are_told_apart_by_their_answers():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    matches = [turn(conversations, prompt, answer) for answer in (ONE, TWO)]
    assert matches[0].session_id != matches[1].session_id
    for match, answer in zip(matches, (ONE, TWO), strict=True):
        after = turn(conversations, [*prompt, answer, user("now run the tests again")])
        assert after.session_id == match.session_id
        assert after.relation is Relation.CONTINUES


def test_two_who_open_alike_at_the_same_moment_are_two():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first, second = (conversations.arrived(SCOPE, prompt) for _ in range(2))
    assert first.session_id != second.session_id


def test_an_answer_that_the_client_rewrote_is_still_its_own():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    rewritten = assistant("Let me look at the parser")
    after = turn(conversations, [*prompt, rewritten, RESULT])
    assert (after.session_id, after.relation) == (first.session_id, Relation.CONTINUES)


def test_a_client_that_leaves_answers_out_is_followed():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    after = turn(conversations, [*prompt, RESULT])
    assert (after.session_id, after.relation) == (first.session_id, Relation.CONTINUES)


def test_a_request_that_was_not_answered_is_tried_again():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    longer = [*prompt, ONE, RESULT]
    conversations.failed(conversations.arrived(SCOPE, longer).session_id)
    again = turn(conversations, longer, TWO)
    assert (again.session_id, again.relation) == (first.session_id, Relation.RETRY)


def test_an_opening_that_was_not_answered_is_tried_again_unless_many_open_like_it():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = conversations.arrived(SCOPE, prompt)
    conversations.failed(first.session_id)
    again = conversations.arrived(SCOPE, prompt)
    assert (again.session_id, again.relation) == (first.session_id, Relation.RETRY)
    conversations.arrived(SCOPE, prompt)
    conversations.failed(first.session_id)
    assert conversations.arrived(SCOPE, prompt).relation is Relation.NEW


def test_an_answer_that_is_made_anew_is_a_retry():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    longer = [*prompt, ONE, RESULT]
    turn(conversations, longer, TWO)
    again = turn(conversations, longer, ONE)
    assert (again.session_id, again.relation) == (first.session_id, Relation.RETRY)


def test_an_edited_last_turn_supersedes():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    turn(conversations, [*prompt, ONE, user("now run the tests again")], TWO)
    edited = turn(conversations, [*prompt, ONE, user("no: delete the tests instead")])
    assert edited.session_id == first.session_id
    assert (edited.relation, edited.known_pieces) == (Relation.SUPERSEDES, 3)


def test_branches_that_run_side_by_side_are_forks_with_a_parent():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    base = [*prompt, ONE]
    matches = [conversations.arrived(SCOPE, [*base, tool(f"result {n} of a tool")]) for n in (1, 2)]
    assert matches[0].session_id == first.session_id
    assert (matches[1].relation, matches[1].parent_id) == (Relation.FORK, first.session_id)
    assert matches[1].session_id != first.session_id


def test_a_branch_from_long_ago_is_a_fork():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    longer = [*prompt, ONE]
    for number in range(6):
        longer += [tool(f"result {number} of a tool"), assistant(f"thought number {number}")]
        turn(conversations, longer[:-1], longer[-1])
    other = turn(conversations, [*prompt, ONE, tool("another result of a tool")])
    assert (other.relation, other.parent_id) == (Relation.FORK, first.session_id)


def test_a_compacted_history_supersedes():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE)
    longer = [*prompt, ONE, RESULT]
    turn(conversations, longer, TWO)
    compacted = [system(), user("summary: we look at the parser"), RESULT, TWO, user("go on")]
    after = turn(conversations, compacted)
    assert (after.session_id, after.relation) == (first.session_id, Relation.SUPERSEDES)


def test_a_system_prompt_that_changes_hides_nobody():
    conversations = table()
    first = turn(conversations, [system("it is monday"), user(OPENINGS[0])], ONE)
    after = turn(conversations, [system("it is tuesday"), user(OPENINGS[0]), ONE, RESULT])
    assert (after.session_id, after.relation) == (first.session_id, Relation.SUPERSEDES)


def test_two_agents_with_one_task_are_two():
    conversations = table()
    first = turn(conversations, [system("you plan"), user(OPENINGS[0])], ONE)
    second = turn(conversations, [system("you write code"), user(OPENINGS[0])], TWO)
    assert (second.relation, second.parent_id) == (Relation.NEW, None)
    assert second.session_id != first.session_id


def test_scopes_never_meet():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    first = turn(conversations, prompt, ONE, scope=1)
    other = turn(conversations, [*prompt, ONE, RESULT], scope=2)
    assert other.session_id != first.session_id
    assert other.relation is Relation.NEW


def test_a_prompt_of_nothing_is_a_session_of_its_own():
    conversations = table()
    assert turn(conversations, []).session_id != turn(conversations, []).session_id


def test_the_table_is_bounded():
    conversations = table(max_sessions=50)
    running = conversations.arrived(SCOPE, [user("runs all the time, and stays")])
    for number in range(500):
        turn(conversations, [system(), user(f"task {number} of very many")], ONE)
    assert len(conversations) == 50
    assert len(conversations._by_head) <= 101
    conversations.answered(running.session_id, [TWO])
    after = turn(conversations, [user("runs all the time, and stays"), TWO, user("what now then?")])
    assert after.session_id == running.session_id


# Conversations at random


@dataclass
class Talk:
    """One conversation as its client sees it."""

    name: str
    prompt: list
    rng: random.Random
    steps: int = 0
    open: list = field(default_factory=list)  # (session id, answer) of what is being answered.

    def say(self):
        return f"{self.name} says {self.rng.randrange(10**9)} at step {self.steps}"


class Generator:
    """Conversations that do what clients do, and who is who.

    Attributes:
        truth: by request, which conversation it belongs to. said: which session it was given to.
    """

    def __init__(self, seed, num_talks):
        self.rng = random.Random(seed)
        self.conversations = table()
        self.talks = [self._talk(str(n)) for n in range(num_talks)]
        self.truth, self.said = [], []
        self._clock = itertools.count()

    def _talk(self, name):
        opening = self.rng.choice(OPENINGS) if self.rng.random() < 0.25 else f"do task {name} now"
        return Talk(name, [system(), user(opening)], random.Random(name))

    def run(self, requests):
        for _ in range(requests):
            self.step(self.rng.choice(self.talks))
        return self

    def step(self, talk):
        match = self.conversations.arrived(SCOPE, talk.prompt)
        self.truth.append(talk.name)
        self.said.append(match.session_id)
        if self.rng.random() < 0.05:
            self.conversations.failed(match.session_id)  # And tried again, later.
            return
        answer = assistant(talk.say())
        self.conversations.answered(match.session_id, [answer])
        talk.steps += 1
        repeated = answer if self.rng.random() < 0.95 else assistant(talk.say())
        talk.prompt = [*talk.prompt, repeated, (tool, user)[talk.steps % 2](talk.say())]
        chance = self.rng.random()
        if chance < 0.04 and len(talk.prompt) > 6:
            talk.prompt = [system(), user(talk.say()), *talk.prompt[-3:]]  # Compacted.
        elif chance < 0.08:
            talk.prompt = [*talk.prompt[:-1], user(talk.say())]  # Edited before it was sent.
        elif chance < 0.12:
            talk.prompt = [system(f"today is {talk.steps}"), *talk.prompt[1:]]

    def scores(self):
        """Pairwise precision and recall, and how many sessions hold two conversations."""
        both = same_session = same_talk = 0
        groups = defaultdict(set)
        for one in range(len(self.truth)):
            groups[self.said[one]].add(self.truth[one])
            for other in range(one):
                talk = self.truth[one] == self.truth[other]
                session = self.said[one] == self.said[other]
                both += talk and session
                same_session += session
                same_talk += talk
        merged = sum(len(names) > 1 for names in groups.values())
        return both / max(1, same_session), both / max(1, same_talk), merged


@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_interleaved_conversations_are_separated(seed):
    generator = Generator(seed, 200).run(2500)
    generator.conversations.check_integrity()
    precision, recall, merged = generator.scores()
    assert precision >= 0.98
    assert recall >= 0.98
    assert merged == 0


@PROPERTY
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 60))
def test_any_interleaving_keeps_the_tables_whole(seed, num_talks, requests):
    generator = Generator(seed, num_talks)
    for _ in range(requests):
        generator.step(generator.rng.choice(generator.talks))
        generator.conversations.check_integrity()
