"""Whose answers a request waits for, by what it says and when."""

import random
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.conversations import Kind, Piece
from saga_core.links import Links, WordReader

SCOPE = 1
READER = WordReader(b"secret")


def piece(kind, text):
    digest = int.from_bytes(blake2b(f"{kind} {text}".encode(), digest_size=8).digest())
    return Piece(digest, len(text), kind)


def said(*messages):
    """Messages such as "user: text" as pieces."""
    return [piece(Kind(kind), text) for kind, text in (each.split(": ", 1) for each in messages)]


class Gateway:
    """Requests as tests write them; each step takes a second."""

    def __init__(self, max_steps=1000):
        self.links = Links(max_steps)
        self.now_s = 0.0

    def arrive(self, key, *messages, scope=SCOPE, opens=True):
        self.now_s += 1.0
        words = READER.read(each.split(": ", 1)[1] for each in messages if opens)
        return self.links.arrived(scope, key, said(*messages), words, self.now_s)

    def answer(self, key, text, *arguments):
        self.now_s += 1.0
        self.links.answered(
            key,
            said(f"assistant: {text}"),
            READER.read([text, *arguments]),
            self.now_s,
            said(*(f"user: {each}" for each in arguments)),
        )

    def run(self, key, *messages, answer, scope=SCOPE):
        """A request that is answered at once; the keys that it waited for."""
        parents = self.arrive(key, *messages, scope=scope)
        self.answer(key, answer)
        return parents


@pytest.fixture
def gateway():
    return Gateway()


ASK = "user: Plan a bridge over the northern river, please."
PLAN = (
    "I will send a Geology Expert for the northern riverbed and a Traffic Planner for commuters. "
    "Afterwards follow design, budget, materials, permits, schedule and maintenance."
)
GEOLOGY = ("system: You are a Geology Expert.", "user: Describe the northern riverbed.")
TRAFFIC = ("system: You are a Traffic Planner.", "user: How many commuters will there be?")
ROCK = "Granite under three metres of gravel, which carries heavy foundations without piles."
CARS = "Twelve thousand commuters daily, mostly between seven and nine in the morning."


def plan_and_send(gateway):
    """A coordinator names two specialists, who run side by side and answer."""
    gateway.run("plan", ASK, answer=PLAN)
    parents = gateway.arrive("geology", *GEOLOGY), gateway.arrive("traffic", *TRAFFIC)
    gateway.answer("geology", ROCK)
    gateway.answer("traffic", CARS)
    return parents


def test_a_turn_waits_for_the_turn_before_it_alone(gateway):
    first, second = "I have looked at the river.", "The bridge needs four pillars."
    assert gateway.run("a", ASK, answer=first) == ()
    assert gateway.run("b", ASK, f"assistant: {first}", "user: go on", answer=second) == ("a",)
    history = (ASK, f"assistant: {first}", "user: go on", f"assistant: {second}", "user: more")
    assert gateway.run("c", *history, answer="That is all there is.") == ("b",)


def test_specialists_wait_for_who_named_them(gateway):
    assert plan_and_send(gateway) == (("plan",), ("plan",))


def test_the_next_turn_of_the_coordinator_waits_for_whom_it_sent(gateway):
    plan_and_send(gateway)
    parents = gateway.arrive("sum", ASK, f"assistant: {PLAN}", "user: What did they find?")
    assert parents == ("geology", "traffic")


def test_the_coordinator_does_not_wait_for_one_that_has_not_answered(gateway):
    gateway.run("plan", ASK, answer=PLAN)
    gateway.run("geology", *GEOLOGY, answer=ROCK)
    gateway.arrive("traffic", *TRAFFIC)
    parents = gateway.arrive("sum", ASK, f"assistant: {PLAN}", "user: What did they find?")
    assert parents == ("geology",)


def test_answers_of_independent_requests_meet(gateway):
    questions = [f"user: What is special about {name}?" for name in ("granite", "gravel", "slate")]
    facts = ["Granite is hard and old.", "Gravel is loose and cheap.", "Slate is split in sheets."]
    for number, (question, fact) in enumerate(zip(questions, facts, strict=True)):
        assert gateway.run(f"q{number}", question, answer=fact) == ()
    pairs = [m for q, f in zip(questions, facts, strict=True) for m in (q, f"assistant: {f}")]
    assert gateway.arrive("all", *pairs, "user: Compare them.") == ("q0", "q1", "q2")


def test_a_summary_in_one_message_waits_for_all_that_it_repeats(gateway):
    plan_and_send(gateway)
    parents = gateway.arrive(
        "sum", "system: You write reports.", f"user: Geology: {ROCK} Traffic: {CARS}"
    )
    assert parents == ("geology", "traffic")


def test_an_answer_told_in_other_words_is_found(gateway):
    gateway.run(
        "plan", ASK, answer="The bridge stands on granite, carries commuters, costs little."
    )
    rewritten = "assistant: The bridge stands on granite and carries many commuters."
    assert gateway.arrive("next", "user: A bridge.", rewritten, "user: And now?") == ("plan",)


def test_a_tool_argument_that_opens_a_session_spawns_it(gateway):
    gateway.arrive("main", "system: You may start agents.", ASK)
    gateway.answer("main", "Let me look into archives.", "Find all drawings of old piers.")
    child = gateway.arrive(
        "child", "system: You are a search agent.", "user: Find all drawings of old piers."
    )
    assert child == ("main",)
    gateway.answer("child", "There are two drawings, both of them of 1890.")
    result = ("assistant: Let me look into archives.", "tool: two drawings of 1890")
    assert gateway.arrive("next", "system: You may start agents.", ASK, *result) == ("child",)


def test_of_equal_answers_the_one_to_the_same_question_counts(gateway):
    other = "user: Plan a tunnel under the southern hills."
    gateway.run("bridge", ASK, answer="I understand. Let me see.")
    gateway.run("tunnel", other, answer="I understand. Let me see.")
    history = (ASK, "assistant: I understand. Let me see.", "user: Thank you.")
    assert gateway.arrive("next", *history) == ("bridge",)


def test_short_answers_link_nobody(gateway):
    gateway.run("a", ASK, answer="Done.")
    assert gateway.arrive("b", "user: Another thing.", "assistant: Done.", "user: Good.") == ()


def test_runs_of_one_workflow_do_not_wait_for_each_other(gateway):
    form = "Repair the given module carefully, run every single check, then describe the changes."
    system = "system: You repair software."
    answer = "I repair the module carefully and describe the changes to the scheduler afterwards."
    assert gateway.run("a", system, f"user: {form} Module scheduler.", answer=answer) == ()
    assert gateway.run("b", system, f"user: {form} Module parser.", answer=answer) == ()


def test_nobody_is_sent_after_a_silence(gateway):
    gateway.run("plan", ASK, answer=PLAN)
    gateway.now_s += 30.0
    assert gateway.arrive("geology", *GEOLOGY) == ()


def test_words_that_many_tasks_use_count_less(gateway):
    common = "I will send a Senior Research Analyst for"
    for number, topic in enumerate(("glacier erosion", "tunnel lighting", "engine noise")):
        gateway.run(f"plan{number}", f"user: Task {number}.", answer=f"{common} {topic}.")
    gateway.run("other", "user: Hello there.", answer="I propose tunnel ventilation by shafts.")
    analyst = ("system: You are a Senior Research Analyst.", "user: Examine tunnel ventilation.")
    assert gateway.arrive("analyst", *analyst, "user: Which shafts?") == ("other",)


def test_who_was_asked_alike_was_not_sent(gateway):
    question = "user: Compare bridge, tunnel, ferry, airship, railway across northern rivers."
    gateway.run("a", question, answer="Travellers prefer whatever arrives punctually.")
    assert gateway.arrive("b", "system: You answer questions.", question) == ()


def test_the_last_turn_of_the_coordinator_sends(gateway):
    """Not one that it has sent, and not its first turn, though they said more of it."""
    plan_and_send(gateway)
    report = (f"user: Geology: {ROCK} Traffic: {CARS}", "system: You write reports.")
    gateway.run("sum", *report, answer="Next I ask a Structural Engineer about piles.")
    engineer = ("system: You are a Structural Engineer.", "user: Granite under gravel, no piles?")
    assert gateway.arrive("engineer", *engineer) == ("sum",)


def test_words_are_forgotten_after_a_minute(gateway):
    gateway.run("plan", ASK, answer=ROCK)
    gateway.now_s += 50.0
    assert gateway.arrive("soon", f"user: Is this right? {ROCK}") == ("plan",)
    gateway.now_s += 20.0
    assert gateway.arrive("late", f"user: Is this right? {ROCK}") == ()


def test_scopes_never_meet(gateway):
    gateway.run("plan", ASK, answer=PLAN, scope=1)
    assert gateway.arrive("geology", *GEOLOGY, scope=2) == ()
    assert gateway.arrive("next", ASK, f"assistant: {PLAN}", "user: Go on.", scope=2) == ()


def test_a_request_that_failed_sends_nobody(gateway):
    gateway.arrive("plan", ASK)
    gateway.links.failed("plan")
    gateway.answer("plan", PLAN)
    assert gateway.arrive("geology", *GEOLOGY) == ()


def test_steps_are_bounded():
    gateway = Gateway(max_steps=10)
    for number in range(100):
        gateway.run(f"r{number}", f"user: question {number}", answer=f"a long answer {number}")
    links = gateway.links
    assert len(links) == 10
    assert len(links._saying) == 10
    assert not links._running


def test_words_are_hashes_of_long_words():
    assert READER.read(["The bridge, THE Bridge: a riverbed"]) == READER.read(["bridge riverbed"])
    assert len(READER.read(["an old oak or two"])) == 0
    assert READER.read(["bridge"]).isdisjoint(WordReader(b"other").read(["bridge"]))
    assert READER.read(["x" * 3000, "bridge"]) == READER.read(["x" * 2000])
    many = " ".join("abcdefghij"[i % 10] * 5 + "klmnopqrst"[i // 10] * 5 for i in range(100))
    assert len(READER.read([many])) == 100


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_edges_go_back_to_answered_requests(seed):
    rng = random.Random(seed)
    gateway, answered, running = Gateway(max_steps=30), set(), []
    texts = [f"assistant: answer number {n} about bridges and rivers" for n in range(6)]
    for number in range(60):
        key = f"r{number}"
        parents = gateway.arrive(key, *rng.sample(texts, 3), f"user: question {number % 4}")
        assert set(parents) <= answered
        assert len(set(parents)) == len(parents)
        running.append(key)
        while running and rng.random() < 0.6:
            done = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.2:
                gateway.links.failed(done)
            else:
                gateway.answer(done, rng.choice(texts).split(": ")[1])
                answered.add(done)
