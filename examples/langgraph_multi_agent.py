"""Two LangGraph agents on one thread. Run it with SAGA_BASE_URL=http://gateway:port/v1."""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

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
graph = StateGraph(MessagesState)
graph.add_node("reader", create_agent(model, [read_file], name="reader"))
graph.add_node("writer", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_edge(START, "reader")
graph.add_edge("reader", "writer")
app = graph.compile(checkpointer=InMemorySaver(), name="explain-code")
# Each turn of a thread goes on with the same session.
config = {"configurable": {"thread_id": "chat-1"}}
for question in ("What does hello.py do?", "Say it shorter."):
    print(app.invoke({"messages": [("user", question)]}, config)["messages"][-1].content)
