"""Programs that the demo's agents run: ``snippets.py NAME``, file names on standard input."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


def largest_classes(files: Sequence[Path]) -> Iterator[str]:
    """The classes with the most methods, the largest first."""
    found = [
        (sum(isinstance(part, ast.FunctionDef) for part in node.body), node.name, file.name)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(errors="replace")))
        if isinstance(node, ast.ClassDef)
    ]
    for methods, name, file_name in sorted(found, reverse=True)[:25]:
        yield f"{name} in {file_name}: {methods} methods"


def longest_functions(files: Sequence[Path]) -> Iterator[str]:
    """The functions with the most lines, the longest first."""
    found = [
        ((node.end_lineno or node.lineno) - node.lineno + 1, node.name, file.name)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(errors="replace")))
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
                for node in ast.walk(ast.parse(file.read_text(errors="replace")))
                if isinstance(node, ast.ImportFrom)
            }
        )
        yield f"{file.parent.name}/{file.name}: {', '.join(names) or 'nothing'}"


SNIPPETS: dict[str, Callable[[Sequence[Path]], Iterator[str]]] = {
    "largest_classes": largest_classes,
    "longest_functions": longest_functions,
    "imports": imports,
}

if __name__ == "__main__":
    for line in SNIPPETS[sys.argv[1]]([Path(name) for name in sys.stdin.read().split("\n")]):
        print(line)
