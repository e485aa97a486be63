"""Which session a request continues, by what it says alone."""

import itertools
import random
from hashlib import blake2b

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


def test_a_system_prompt_that_is_as_it_was_before_hides_nobody():
    conversations, prompt = table(), [user(OPENINGS[0])]
    first = turn(conversations, [system("be brief"), *prompt], ONE)
    prompt += [ONE, RESULT]
    turn(conversations, [system("be thorough"), *prompt], TWO)
    for number in range(5):
        prompt += [
            TWO if not number else assistant(f"thought {number} of it"),
            user(f"go {number}"),
        ]
        turn(
            conversations,
            [system("be thorough"), *prompt],
            assistant(f"thought {number + 1} of it"),
        )
    prompt += [assistant("thought 5 of it"), user("and now?")]
    after = turn(conversations, [system("be brief"), *prompt])
    assert after.session_id == first.session_id


def test_what_sums_up_several_answers_is_none_of_their_sessions():
    conversations = table()
    asked = [
        (user(f"question {n} of a coordinator"), assistant(f"finding {n}, which one of them made"))
        for n in (1, 2)
    ]
    found = {
        turn(conversations, [system(f"role {n}"), q], a).session_id
        for n, (q, a) in enumerate(asked)
    }
    prompt = [system("you sum up"), *itertools.chain(*asked), user("now sum up")]
    summary = turn(conversations, prompt)
    assert (summary.relation, len(found)) == (Relation.NEW, 2)
    assert summary.session_id not in found


def test_a_branch_with_a_system_prompt_that_its_parent_had_stays_itself():
    conversations, prompt = table(), [user(OPENINGS[0])]
    before, now = system("be brief"), system("be thorough")
    first = turn(conversations, [before, *prompt], ONE)
    prompt += [ONE, RESULT]
    turn(conversations, [now, *prompt], TWO)
    prompt += [TWO]
    main = conversations.arrived(SCOPE, [now, *prompt, tool("the result of the main line")])
    branch = [*prompt, user("instead, try another way")]
    fork = turn(conversations, [now, *branch], assistant("the branch goes on"))
    conversations.answered(main.session_id, [])
    after = turn(conversations, [before, *branch, assistant("the branch goes on"), user("on")])
    assert main.session_id == first.session_id != fork.session_id
    assert after.session_id == fork.session_id


def test_a_branch_with_another_system_prompt_stays_itself():
    conversations, prompt = table(), [user(OPENINGS[0])]
    first = turn(conversations, [system(), *prompt], ONE)
    base = [*prompt, ONE]
    main = conversations.arrived(SCOPE, [system(), *base, tool("the result of the main line")])
    branch = turn(conversations, [system(), *base, user("instead, try another way")], TWO)
    assert (main.session_id, branch.parent_id) == (first.session_id, first.session_id)
    longer = [*base, user("instead, try another way"), TWO, RESULT]
    after = turn(conversations, [system("now be brief"), *longer])
    assert (after.session_id, after.relation) == (branch.session_id, Relation.SUPERSEDES)


# Plain text

BLOCK_CHARS = 16
LONG = "".join(f"line {number} of a plain prompt\n" for number in range(20))


def plain(conversations, text, *, answers=True):
    """A request of plain text, cut into blocks."""
    blocks = [text[at : at + BLOCK_CHARS] for at in range(0, len(text), BLOCK_CHARS)]
    pieces = [user(block) for block in blocks]
    match = conversations.arrived(SCOPE, pieces, lambda start, end: user(text[start:end]).digest)
    if answers:
        conversations.answered(match.session_id, [])
    conversations.check_integrity()
    return match


@PROPERTY
@given(st.integers(1, 300), st.integers(1, 200))
def test_a_text_that_begins_with_a_whole_prompt_continues(length, added):
    conversations = table()
    first = plain(conversations, LONG[:length])
    assert first.relation is Relation.NEW
    after = plain(conversations, LONG[: length + added])
    assert (after.session_id, after.relation) == (first.session_id, Relation.CONTINUES)


def test_a_text_with_most_of_a_prompt_in_common_is_another():
    conversations = table()
    first = plain(conversations, f"{LONG}question one")
    other = plain(conversations, f"{LONG}question two, which is longer")
    assert (other.relation, other.parent_id) == (Relation.NEW, None)
    assert other.session_id != first.session_id


def test_plain_openings_that_are_equal_are_nobodys():
    conversations = table()
    ids = [plain(conversations, LONG).session_id for _ in range(2)]
    after = plain(conversations, f"{LONG}and more")
    assert after.relation is Relation.NEW
    assert len({*ids, after.session_id}) == 3


def test_plain_text_is_retried_edited_and_branched_from():
    conversations = table()
    first = plain(conversations, LONG)
    steps = [f"{LONG}{'step ' * number}" for number in range(1, 5)]
    assert {plain(conversations, text).session_id for text in steps} == {first.session_id}
    assert plain(conversations, steps[-1]).relation is Relation.RETRY
    edited = plain(conversations, f"{steps[-2]}edit")
    assert (edited.session_id, edited.relation) == (first.session_id, Relation.SUPERSEDES)
    branch = plain(conversations, f"{steps[0]}branch")
    assert (branch.relation, branch.parent_id) == (Relation.FORK, first.session_id)


def test_plain_text_that_is_cut_in_its_grown_part_is_its_sessions_and_nobody_elses():
    conversations = table()
    grown = f"{LONG}{LONG.replace('line', 'result')}"
    first = plain(conversations, LONG)
    assert plain(conversations, grown).session_id == first.session_id
    cut = grown[: len(LONG) + 300] + "and now something that is new\n" * 9
    after = plain(conversations, cut)
    assert (after.session_id, after.relation) == (first.session_id, Relation.SUPERSEDES)
    # What an opening says may be a template.
    other = plain(conversations, f"{LONG[:300]}and now another task for an agent\n" * 9)
    assert other.relation is Relation.NEW


def test_plain_text_that_goes_on_while_its_session_runs_is_a_fork():
    conversations = table()
    first = plain(conversations, LONG, answers=False)
    other = plain(conversations, f"{LONG}and more")
    assert (other.relation, other.parent_id) == (Relation.FORK, first.session_id)


def test_the_ends_of_plain_prompts_are_bounded():
    conversations = table(max_sessions=20)
    for number in range(300):
        plain(conversations, f"task {number} {LONG[:number]}")
    assert len(conversations) == 20
    assert len(conversations._endings._by_owner) == 20
    for number in range(100):
        plain(conversations, LONG[: number + 100])
    assert all(len(ends) <= 8 for ends in conversations._endings._by_owner.values())


# At random


@PROPERTY
@given(st.integers(0, 10**6), st.integers(1, 80))
def test_any_sequence_keeps_the_tables_whole(seed, requests):
    """Clients that go on, go back, leave out and mix up what was said."""
    rng = random.Random(seed)
    conversations = table(max_sessions=5)
    said = [piece(kind, f"{kind} says {n} at some length") for n in range(3) for kind in Kind]
    prompts, running = [[]], []
    for _ in range(requests):
        prompt = [*rng.choice(prompts), *rng.choices(said, k=rng.randint(0, 3))]
        prompt = prompt if rng.random() < 0.8 else prompt[rng.randint(0, len(prompt)) :]
        prompts.append(prompt)
        running.append(conversations.arrived(rng.randint(1, 2), prompt).session_id)
        assert len(conversations) <= 5 + len(running)
        while running and rng.random() < 0.6:
            session_id = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.2:
                conversations.failed(session_id)
            else:
                conversations.answered(session_id, rng.choices(said, k=rng.randint(0, 2)))
        conversations.check_integrity()


def test_what_sessions_are_found_by_is_bounded_in_all():
    conversations = table(max_sessions=10)
    prompts = [[system(), user(f"task {n}, which is to be done")] for n in range(10)]
    for step in range(30):
        for n, prompt in enumerate(prompts):
            answer = assistant(f"answer {step} of {n} to all that was said")
            turn(conversations, prompt, answer)
            prompt += [answer, tool(f"result {step} of {n}, at some length")]
    keys = len(conversations._by_head) + len(conversations._by_anchor)
    assert keys <= 24 * 10 + 128
    assert 0 < len(conversations) < 10


def test_two_who_said_and_were_answered_alike_go_on_each_in_their_own():
    conversations, prompt = table(), [system(), user(OPENINGS[0])]
    ids = [turn(conversations, prompt, ONE).session_id for _ in range(2)]
    after = [
        turn(conversations, [*prompt, ONE, user(text)], TWO).session_id
        for text in ("now run the tests, please", "now write the report, please")
    ]
    assert sorted(after) == sorted(ids)
    assert len(set(after)) == 2


def test_a_run_that_says_again_what_one_before_it_said_is_its_own():
    conversations = table()
    answers = [assistant(f"answer number {n} to what was said") for n in range(4)]
    results = [tool(f"result number {n}, of some length") for n in range(4)]
    runs = []
    for _ in range(2):
        prompt, ids = [system(), user(OPENINGS[0])], []
        for answer, result in zip(answers, results, strict=True):
            ids.append(turn(conversations, prompt, answer).session_id)
            prompt = [*prompt, answer, result]
        runs.append(set(ids))
    assert [len(ids) for ids in runs] == [1, 1]
    assert runs[0] != runs[1]


def test_the_bound_holds_behind_many_that_run():
    conversations = table(max_sessions=200)
    for n in range(100):
        conversations.arrived(SCOPE, [user(f"this one runs, number {n}")])
    for n in range(1000):
        turn(conversations, [user(f"this one is answered, number {n}")], ONE)
    assert len(conversations) <= 200
