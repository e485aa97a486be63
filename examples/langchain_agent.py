"""A LangChain agent. Run it with SAGA_BASE_URL=http://gateway:port/v1 and SAGA_MODEL."""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

import saga_sdk as saga

BASE_URL = os.environ["SAGA_BASE_URL"]
saga.instrument(base_urls=[BASE_URL])


@tool
def read_file(path: str) -> str:
    """Read a file of the project."""
    return f"The contents of {path}: print('hello')"


model = ChatOpenAI(
    model=os.environ.get("SAGA_MODEL", "default"),
    base_url=BASE_URL,
    api_key=os.environ.get("SAGA_API_KEY", "none"),
)
agent = create_agent(model, [read_file], name="explain-code")
result = agent.invoke({"messages": [("user", "What does hello.py do?")]})
print(result["messages"][-1].content)
