"""An agent that asks another one. Run it with SAGA_BASE_URL=http://gateway:port/v1, SAGA_MODEL."""

import os

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

import saga_sdk as saga

BASE_URL = os.environ["SAGA_BASE_URL"]
saga.instrument(base_urls=[BASE_URL])
# The SDK would send its traces to OpenAI.
set_tracing_disabled(True)


@function_tool
def read_file(path: str) -> str:
    """Read a file of the project."""
    return f"The contents of {path}: print('hello')"


client = AsyncOpenAI(base_url=BASE_URL, api_key=os.environ.get("SAGA_API_KEY", "none"))
model = OpenAIChatCompletionsModel(os.environ.get("SAGA_MODEL", "default"), client)
reader = Agent(name="reader", instructions="Read code.", model=model, tools=[read_file])
writer = Agent(
    name="writer",
    instructions="Explain code in one sentence. Ask the reader first.",
    model=model,
    tools=[reader.as_tool("ask_reader", "Ask someone who reads code.")],
)
print(Runner.run_sync(writer, "What does hello.py do?").final_output)
