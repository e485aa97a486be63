"""A hand-written agent loop. Run it with SAGA_BASE_URL=http://gateway:port/v1 and SAGA_MODEL."""

import json
import os

from openai import OpenAI

import saga_sdk as saga

BASE_URL = os.environ["SAGA_BASE_URL"]
saga.instrument(base_urls=[BASE_URL])


@saga.tool
def read_file(path: str) -> str:
    """Read a file of the project."""
    return f"The contents of {path}: print('hello')"


parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
function = {"name": "read_file", "description": read_file.__doc__, "parameters": parameters}
messages = [{"role": "user", "content": "What does hello.py do?"}]

client = OpenAI(base_url=BASE_URL, api_key=os.environ.get("SAGA_API_KEY", "none"))
with saga.workflow("explain-code"):
    while True:
        answer = client.chat.completions.create(
            model=os.environ.get("SAGA_MODEL", "default"),
            messages=messages,
            tools=[{"type": "function", "function": function}],
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            text = read_file(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
print(message.content)
