"""The messages of the library's ValueErrors, read from its source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def text_of(node: ast.AST) -> str:
    """The words of a message. What is filled in stands as "..."."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value) if isinstance(value, ast.Constant) else "..." for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return "..."


def messages() -> Iterator[tuple[str, str]]:
    """(file, message) of each `raise ValueError(...)` in dpx/, in the order of the files and lines."""
    for path in sorted((ROOT / "dpx").rglob("*.py")):
        raised = [
            node.exc
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call)
            and getattr(node.exc.func, "id", None) == "ValueError"
        ]
        for call in sorted(raised, key=lambda call: call.lineno):
            text = re.sub(r"\s+", " ", text_of(call.args[0]))
            yield path.relative_to(ROOT / "dpx").as_posix(), re.sub(r"\.{4,}", "...", text)
