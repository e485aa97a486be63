"""A crew of two agents. Run it with SAGA_BASE_URL=http://gateway:port/v1 and SAGA_MODEL."""

import os

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import saga_sdk as saga

BASE_URL = os.environ["SAGA_BASE_URL"]
saga.instrument(base_urls=[BASE_URL])


@tool
def read_file(path: str) -> str:
    """Read a file of the project."""
    return f"The contents of {path}: print('hello')"


model = os.environ.get("SAGA_MODEL", "default")
api_key = os.environ.get("SAGA_API_KEY", "none")
llm = LLM(model=f"hosted_vllm/{model}", base_url=BASE_URL, api_key=api_key)
reader = Agent(
    role="Reader", goal="Find out what code does", backstory="Reads", llm=llm, tools=[read_file]
)
writer = Agent(role="Writer", goal="Explain it in one sentence", backstory="Writes", llm=llm)
tasks = [
    Task(description="Read hello.py", expected_output="what it does", agent=reader),
    Task(description="Explain it", expected_output="one sentence", agent=writer),
]
print(Crew(name="explain-code", agents=[reader, writer], tasks=tasks).kickoff().raw)
