"""Tool types by name and by alias."""

import pytest

from saga_core.types import ToolType, parse_tool_type, tool_type_of


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("delegate_work_to_coworker", ToolType.SUBAGENT),
        ("research_agent", ToolType.SUBAGENT),
        ("transfer_to_billing", ToolType.SUBAGENT),
        ("Task", ToolType.SUBAGENT),
        ("handoff_to_python_coder", ToolType.SUBAGENT),  # Before code: the table's order.
        ("ask_user", ToolType.HUMAN),
        ("request_approval", ToolType.HUMAN),
        ("human_input", ToolType.HUMAN),
        ("execute_sql", ToolType.DB_QUERY),  # Before exec.
        ("vector_search", ToolType.DB_QUERY),
        ("orders_db", ToolType.DB_QUERY),
        ("bash", ToolType.CODE_EXEC),
        ("Bash", ToolType.CODE_EXEC),
        ("run_tests", ToolType.CODE_EXEC),
        ("python_repl", ToolType.CODE_EXEC),
        ("execute_command", ToolType.CODE_EXEC),
        ("web_search", ToolType.WEB_API),  # Before search.
        ("http_get", ToolType.WEB_API),
        ("WebFetch", ToolType.WEB_API),
        ("browser_click", ToolType.WEB_API),
        ("read_file", ToolType.FILE_IO),
        ("str_replace_editor", ToolType.FILE_IO),
        ("Grep", ToolType.FILE_IO),
        ("ls", ToolType.FILE_IO),
        ("search", ToolType.FILE_IO),
        ("think", ToolType.OTHER),
        ("calculator", ToolType.OTHER),
        ("", ToolType.OTHER),
        ("日本語", ToolType.OTHER),
    ],
)
def test_the_name_of_a_tool_tells_its_type(name, tool):
    assert tool_type_of(name) is tool


@pytest.mark.parametrize(
    ("value", "tool"),
    [
        *((str(tool), tool) for tool in ToolType),
        ("IO", ToolType.FILE_IO),
        ("Code", ToolType.CODE_EXEC),
        ("wEb", ToolType.WEB_API),
        ("db", ToolType.DB_QUERY),
        ("HUMAN", ToolType.HUMAN),
        ("", None),
        ("files", None),
        ("FILE-IO", None),
        (" io", None),
    ],
)
def test_a_type_is_read_by_value_or_alias_in_any_case(value, tool):
    assert parse_tool_type(value) is tool
