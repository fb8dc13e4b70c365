"""The docstrings of dpx as reStructuredText: their form is described in CONTRIBUTING.md.

A line such as "name: meaning", with its continuation indented, is an entry of a list of arguments. An indented
paragraph is code, or a formula if it does not name dpx. All other lines are prose, with code in backticks.
"""

import inspect
import re

ARGUMENT = re.compile(r"([a-z_][a-z_0-9]*(?:, [a-z_][a-z_0-9]*)*): +(?=\S)")
FOLLOWING = re.compile(r"(?:(?<=\.)|;) ([a-z_]+(?:, [a-z_]+)*)(?=: )")
SPAN = re.compile(r"`+[^`]+`+|https?://[^\s)>,;]+")
PUBLIC = re.compile(r"dpx(\.\w+)+")


def escaped(text: str) -> str:
    """Prose, in which only code in backticks has a meaning."""
    parts, end = [], 0
    for span in SPAN.finditer(text):
        parts += [re.sub(r"([*|_\\])", r"\\\1", text[end : span.start()]), span_of(span[0])]
        end = span.end()
    return "".join([*parts, re.sub(r"([*|_\\])", r"\\\1", text[end:])])


def span_of(text: str) -> str:
    if not text.startswith("`"):
        return text.rstrip(".") + ("\\ ." if text.endswith(".") else "")
    code = text.strip("`")
    return f"\\ :py:obj:`{code}`\\ " if PUBLIC.fullmatch(code) else f"\\ ``{code}``\\ "


def paragraphs(lines: list[str]) -> list[list[str]]:
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line)
        elif found[-1]:
            found.append([])
    return [paragraph for paragraph in found if paragraph]


def entries(paragraph: list[str]) -> list[list[str]]:
    """The lines of each argument, or of each point of a list."""
    found: list[list[str]] = []
    for line in paragraph:
        if not line.startswith(" ") and (ARGUMENT.match(line) or line.startswith("* ")):
            found.append([line])
        elif found:
            found[-1].append(line)
        else:
            found.append([line])
    return found


def prose(lines: list[str]) -> str:
    """One line, so that a span over two lines stays one."""
    text = escaped(" ".join(line.strip() for line in lines))
    return re.sub(r"^(\w)\.", r"\1\\.", text)  # a matrix C, and no list


def names_of(obj: object) -> set[str]:
    """The arguments of a function, or the fields of a class."""
    try:
        return set(inspect.signature(obj).parameters)  # type: ignore
    except (TypeError, ValueError):
        return set()


def one_a_line(lines: list[str], names: set[str]) -> list[str]:
    """An argument that follows another one in the same line begins a line of its own."""
    found = []
    for line in lines:
        inside = line.startswith(" ") and not line.startswith("        ")
        if ARGUMENT.match(line) or inside:
            line = FOLLOWING.sub(lambda m: f"\n{m[1]}" if set(m[1].split(", ")) <= names else m[0], line)
        found += line.split("\n")
    return found


def converted(lines: list[str], names: set[str] = frozenset()) -> list[str]:  # type: ignore
    result: list[str] = []
    for paragraph in paragraphs(one_a_line(lines, names)):
        if all(line.startswith("    ") for line in paragraph):
            text = "\n".join(paragraph)
            language = "python" if ">>> " in text or "dpx." in text else "none"
            result += [f".. code-block:: {language}", "", *paragraph, ""]
            continue
        for entry in entries(paragraph):
            argument = ARGUMENT.match(entry[0])
            if argument:
                rest = entry[0][argument.end() :]
                result += [f"``{argument[1]}``", f"    {prose([rest, *entry[1:]])}", ""]
            elif entry[0].startswith("* "):
                result += [f"* {prose([entry[0][2:], *entry[1:]])}", ""]
            elif len(paragraph) > 1 and len(entry) == 1 and entry[0].endswith(":"):
                result += [prose(entry) if "`" in entry[0] else f"**{prose(entry)}**", ""]  # of a group of arguments
            else:
                result += [prose(entry), ""]
    return result


def process(app, what, name, obj, options, lines) -> None:
    lines[:] = converted(lines, names_of(obj))


def is_bare_field(app, what, name, obj, skip, options) -> bool | None:
    """Leaves out the fields of a NamedTuple, which have no text of their own: the docstring of the class has it."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def without_object(app, what, name, obj, options, signature, annotation) -> tuple:
    """Shows a default that is a function as its name, and one that has no name as dots."""
    named = re.sub(r"<function (\w+)>", r"\1", signature or "")
    return re.sub(r"<(?:object object|factory|function [\w.]+<lambda>)>", "...", named) or signature, annotation


def setup(app):
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", without_object)
    app.connect("autodoc-skip-member", is_bare_field)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
