"""Workflows, told apart by what their prompts have in common."""

import random

import pytest

from saga_core.prompts import PromptReader
from saga_core.workflows import PLAIN, WorkflowClasses

READER = PromptReader(b"key")
RULES = [f"Rule number {word}: never do that without asking." for word in ("one", "two", "three")]


def chat(*messages, tools=(), model="m"):
    named = [{"type": "function", "function": {"name": name}} for name in tools]
    content = [{"role": role, "content": text} for role, text in messages]
    return {"model": model, "messages": content, "tools": named}


def classify(classes, content, scope=1, api="chat"):
    prompt = READER.read(api, content)
    known = classes.known(scope, prompt.shape)
    found = classes.learn(scope, prompt.shape, READER.template(api, content))
    classes.check_integrity()
    assert known in (None, found)
    return found


def coder(task, date="2026-11-30 10:00", tools=("bash", "edit")):
    system = "\n".join(["You are a careful coding agent.", f"It is {date}.", *RULES])
    return chat(("system", system), ("user", task), tools=tools)


def test_runs_of_one_agent_are_one_workflow_whatever_they_are_asked():
    classes = WorkflowClasses()
    names = {classify(classes, coder(f"fix bug {n}", f"2026-11-{n:02}")) for n in range(1, 20)}
    assert len(names) == len(classes) == 1


def test_a_run_that_fills_its_prompt_with_its_own_is_still_one_of_them():
    classes, names = WorkflowClasses(), set()
    for run in range(5):
        files = "\n".join(f"src/module_{run}_{name}/file.py is here" for name in "abcdefghijklm")
        content = coder("fix it")
        content["messages"][0]["content"] += "\n" + files
        names.add(classify(classes, content))
    assert len(names) == 1


@pytest.mark.parametrize(
    "other",
    [
        coder("fix", tools=("search",)),
        {**coder("fix"), "model": "n"},
        chat(("system", "You are a security reviewer."), ("user", "fix"), tools=("bash", "edit")),
        chat(("user", "You are a careful coding agent."), tools=("bash", "edit")),
    ],
)
def test_other_tools_models_and_roles_are_other_workflows(other):
    classes = WorkflowClasses()
    assert classify(classes, coder("fix")) != classify(classes, other)


def test_roles_under_one_preamble_are_told_apart_by_their_first_line():
    classes = WorkflowClasses()
    names = [
        classify(classes, chat(("system", "\n".join([f"You are the {role}.", *RULES]))))
        for role in ("planner", "writer", "critic")
    ]
    assert len(set(names)) == 3
    few = [classify(classes, chat(("system", f"You are the {r} here."))) for r in ("one", "two")]
    assert few[0] != few[1]


def test_a_name_in_the_first_line_does_not_part_them():
    classes = WorkflowClasses()
    more = [*RULES, "Answer in one sentence.", "Say so when you do not know."]
    names = {
        classify(classes, chat(("system", "\n".join([f"You are helping {who} today.", *more * 2]))))
        for who in ("Ada", "Grace", "Barbara")
    }
    assert len(names) == 1


def test_a_template_in_the_first_message_makes_a_workflow_from_the_second_run_on():
    classes = WorkflowClasses()
    names = [
        classify(classes, chat(("user", f"<pr_description>\nConsider this:\nbug {n} in {n}\n" * 2)))
        for n in ("parser", "lexer", "printer")
    ]
    assert names[0] == PLAIN != names[1] == names[2]


def test_people_who_chat_make_no_workflows():
    classes, rng = WorkflowClasses(), random.Random(0)
    words = ["tides", "harbour", "engine", "parser", "river", "garden", "violin"]
    for _ in range(30):
        text = " ".join(rng.choices(words, k=12))
        assert classify(classes, chat(("user", text))) == PLAIN


def test_tenants_do_not_share_workflows_and_the_table_is_bounded():
    classes = WorkflowClasses(max_classes=10)
    assert classify(classes, coder("x"), scope=1) == classify(classes, coder("x"), scope=2)
    assert len(classes) == 2
    for n in range(50):
        classify(classes, coder("x", tools=(f"tool{n}",)))
    assert len(classes) == 10
    assert classes.known(2, READER.read("chat", coder("x")).shape) is None
