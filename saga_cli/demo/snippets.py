"""Programs that the demo's agents run: ``snippets.py NAME``, file names on standard input."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


def count_lines(files: Sequence[Path]) -> Iterator[str]:
    """Code, comment and blank lines of every file."""
    for file in files:
        lines = [line.strip() for line in file.read_text().splitlines()]
        blank = sum(not line for line in lines)
        comment = sum(line.startswith("#") for line in lines)
        code = len(lines) - blank - comment
        yield f"{file.parent.name}/{file.name}: code {code}, comment {comment}, blank {blank}"


def longest_functions(files: Sequence[Path]) -> Iterator[str]:
    """The functions with the most lines, the longest first."""
    found = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name, file.name)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for lines, name, file_name in sorted(found, reverse=True)[:25]:
        yield f"{name} in {file_name}: {lines} lines"


def imports(files: Sequence[Path]) -> Iterator[str]:
    """What every module imports."""
    for file in files:
        names = sorted(
            {
                node.module or ""
                for node in ast.walk(ast.parse(file.read_text()))
                if isinstance(node, ast.ImportFrom)
            }
        )
        yield f"{file.parent.name}/{file.name}: {', '.join(names) or 'nothing'}"


SNIPPETS: dict[str, Callable[[Sequence[Path]], Iterator[str]]] = {
    "count_lines": count_lines,
    "longest_functions": longest_functions,
    "imports": imports,
}

if __name__ == "__main__":
    for line in SNIPPETS[sys.argv[1]]([Path(name) for name in sys.stdin.read().split("\n")]):
        print(line)
