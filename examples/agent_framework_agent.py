"""An agent that asks another one. Run it with SAGA_BASE_URL=http://gateway:port/v1, SAGA_MODEL."""

import asyncio
import os

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatCompletionClient

import saga_sdk as saga

BASE_URL = os.environ["SAGA_BASE_URL"]
saga.instrument(base_urls=[BASE_URL])


@tool(approval_mode="never_require")
async def read_file(path: str) -> str:
    """Read a file of the project."""
    return f"The contents of {path}: print('hello')"


client = OpenAIChatCompletionClient(
    model=os.environ.get("SAGA_MODEL", "default"),
    base_url=BASE_URL,
    api_key=os.environ.get("SAGA_API_KEY", "none"),
)
reader = Agent(client, "You read code.", name="reader", tools=[read_file])
writer = Agent(
    client,
    "Explain code in one sentence. Ask the reader first.",
    name="writer",
    tools=[reader.as_tool(name="ask_reader", description="Ask someone who reads code.")],
)
print(asyncio.run(writer.run("What does hello.py do?")).text)
