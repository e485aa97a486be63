"""Real LangChain agents for the tests, and the ways to run one."""

from __future__ import annotations

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI


@tool
def read_file(text: str) -> str:
    """Read a file."""
    return text


@tool
def run_python(text: str) -> str:
    """Run code."""
    return text


@tool
def fetch_url(text: str) -> str:
    """Fetch a page."""
    return text


TOOLS: list[BaseTool] = [read_file, run_python, fetch_url]


def make_model(base_url: str, **kwargs: Any) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=base_url, api_key="none", **kwargs)


def make_agent(base_url: str, *, tools: list[BaseTool] = TOOLS, **kwargs: Any) -> Any:
    return create_agent(make_model(base_url), tools, **kwargs)


def ask(plan: str) -> dict[str, Any]:
    return {"messages": [("user", plan)]}


def answer_of(result: dict[str, Any]) -> str:
    return str(result["messages"][-1].content).strip()


async def run(agent: Any, how: str, plan: str, config: dict[str, Any] | None = None) -> str:
    """Run the agent by its method ``how`` and return its last words."""
    if how == "invoke":
        return answer_of(await asyncio.to_thread(agent.invoke, ask(plan), config))
    if how == "ainvoke":
        return answer_of(await agent.ainvoke(ask(plan), config))
    if how == "stream":
        return answer_of(await asyncio.to_thread(_consume, agent, plan, config))
    if how == "stream tokens":
        return answer_of(await asyncio.to_thread(_consume, agent, plan, config, tokens=True))
    tokens = how == "astream tokens"
    last = None
    async for mode, item in agent.astream(ask(plan), config, stream_mode=_modes(tokens)):
        last = item if mode == "values" else last
    return answer_of(last)


def _modes(tokens: bool) -> list[str]:
    return ["values", "messages"] if tokens else ["values"]


def _consume(agent: Any, plan: str, config: Any, *, tokens: bool = False) -> Any:
    last = None
    for mode, item in agent.stream(ask(plan), config, stream_mode=_modes(tokens)):
        last = item if mode == "values" else last
    return last


WAYS = ("invoke", "ainvoke", "stream", "astream", "stream tokens", "astream tokens")
