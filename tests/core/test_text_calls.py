"""Tool calls that are written as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saga_core.text_calls import tool_in_text

MINI_SWE = "THOUGHT: look for the file.\n\n```bash\ngrep -rn 'sql' .\n```"


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        (MINI_SWE, "bash"),
        (f"<format_example>\n{MINI_SWE}\n</format_example>", "bash"),
        ("First:\n```python\nx = 1\n```\nthen\n```sh\nls\n```\n", "bash"),
        ("Let me compute it.\n```python\nprint(2 ** 10)\n```", "python"),
        ("Thought: I should search.\nAction: search[high tide]", "search"),
        ("Thought: x\n**Action:** `web_search`\nAction Input: tides", "web_search"),
        ("Thought: I know.\nAction: finish\nFinal Answer: 42", None),
        (
            '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
            "weather",
        ),
        ('[TOOL_CALLS] [{"name": "lookup", "arguments": {}}]', "lookup"),
        ("<function=read_file><parameter=path>a</parameter></function>", "read_file"),
        ('{"name": "cancel_order", "parameters": {"id": "7"}}', "cancel_order"),
        ('```json\n{"action": "open", "action_input": "a.txt"}\n```', "open"),
        ('{"name": "Ada", "born": 1815}', None),
        ("Run ```pip install x``` and you are done.", None),
        ("```bash\npip install x\n```\nThat installs it; then call the function as shown.", None),
        ("The action: none. Nothing is to be done.", None),
        ("", None),
    ],
)
def test_what_a_text_calls(text, tool):
    assert tool_in_text(text) == tool


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet="`ab\n:Action<{\"'} ", max_size=200))
def test_any_text_gives_a_legal_name_or_none(text):
    tool = tool_in_text(text)
    assert tool is None or (tool and tool.isascii())


def test_a_long_text_is_read_at_its_end_alone():
    assert tool_in_text("```" * 100_000 + MINI_SWE) == "bash"
