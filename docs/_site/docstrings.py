"""The docstrings of dpx as reStructuredText: their form is described in CONTRIBUTING.md.

A line such as "name: meaning", with its continuation indented, is an entry of a list of arguments. An indented
paragraph is code. All other lines are prose, with code in backticks.
"""

import re

ARGUMENT = re.compile(r"([a-z_][a-z_0-9]*(?:, [a-z_][a-z_0-9]*)*): +(?=\S)")
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
    return escaped(" ".join(line.strip() for line in lines))


def converted(lines: list[str]) -> list[str]:
    result: list[str] = []
    for paragraph in paragraphs(lines):
        if all(line.startswith("    ") for line in paragraph):
            result += ["::", "", *paragraph, ""]
            continue
        for entry in entries(paragraph):
            argument = ARGUMENT.match(entry[0])
            if argument:
                rest = entry[0][argument.end() :]
                result += [f"``{argument[1]}``", f"    {prose([rest, *entry[1:]])}", ""]
            elif entry[0].startswith("* "):
                result += [f"* {prose([entry[0][2:], *entry[1:]])}", ""]
            else:
                result += [prose(entry), ""]
    return result


def process(app, what, name, obj, options, lines) -> None:
    lines[:] = converted(lines)


def setup(app):
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
