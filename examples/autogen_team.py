"""A team of two agents. Run it with SAGA_BASE_URL=http://gateway:port/v1 and SAGA_MODEL."""

import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

import saga_sdk as saga

BASE_URL = os.environ["SAGA_BASE_URL"]
saga.instrument(base_urls=[BASE_URL])


async def read_file(path: str) -> str:
    """Read a file of the project."""
    return f"The contents of {path}: print('hello')"


client = OpenAIChatCompletionClient(
    model=os.environ.get("SAGA_MODEL", "default"),
    base_url=BASE_URL,
    api_key=os.environ.get("SAGA_API_KEY", "none"),
    model_info=ModelInfo(
        vision=False,
        function_calling=True,
        json_output=True,
        structured_output=True,
        family="unknown",
    ),
)
reader = AssistantAgent("reader", client, tools=[read_file], reflect_on_tool_use=True)
writer = AssistantAgent("writer", client, system_message="Explain it in one sentence.")
team = RoundRobinGroupChat([reader, writer], name="explain-code", max_turns=2)
result = asyncio.run(team.run(task="What does hello.py do?"))
print(result.messages[-1].content)
