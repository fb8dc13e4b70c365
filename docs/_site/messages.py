"""The messages of the library's ValueErrors and warnings, read from its source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WARNING = "UserWarning: "  # how a warning begins where Python prints it


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
    """(file, message) of each `raise ValueError(...)`, `warn_user(...)` and `error.add_note(...)` in dpx/, in the
    order of the files and lines."""
    for path in sorted((ROOT / "dpx").rglob("*.py")):
        tree = ast.parse(path.read_text())
        named = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
        errors = [node for node in raised if isinstance(node, ast.Call) and ast.unparse(node.func) == "ValueError"]
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        warned = [node for node in calls if ast.unparse(node.func) == "warn_user"]
        noted = [node for node in calls if ast.unparse(node.func).endswith(".add_note")]
        for call in sorted([*errors, *warned, *noted], key=lambda call: call.lineno):
            said = text_of(named.get(ast.unparse(call.args[0]), call.args[0]))
            text = re.sub(r"\.{4,}", "...", re.sub(r"\s+", " ", said))
            yield path.relative_to(ROOT / "dpx").as_posix(), WARNING * (call in warned) + text
