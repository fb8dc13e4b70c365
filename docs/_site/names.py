"""Each page of the reference begins with a table of its names: a link, and the first sentence of the docstring.

Long names may break between their words: in tables, in the menu at the right, and everywhere on a telephone.
"""

import importlib
import inspect
import re

DOCUMENTED = re.compile(r"^\.\. auto(?:function|class):: (\S+)$", re.MULTILINE)
NAME = re.compile(r'(<span class="pre">)([^<]+)')
BREAK = re.compile(r"(?<=[._/(=])(?=[^\W\d])|(?<=[a-z])(?=[A-Z])")
SENTENCE = re.compile(r"(?:[^.]|\.(?! [A-Z`]| \w+: |$))+")  # up to a period that ends it


def found(path: str) -> object:
    """The object of a public name, such as "dpx.sampling.FixedOrder"."""
    value: object = importlib.import_module("dpx")
    parts = path.split(".")
    for number, name in enumerate(parts[1:], start=2):
        value = getattr(value, name, None) or importlib.import_module(".".join(parts[:number]))
    return value


def first_sentence(value: object) -> str:
    """In one line, as Markdown in a table."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    sentence = (SENTENCE.match(paragraph) or [paragraph])[0]
    parts = re.split(r"(`[^`]*`)", sentence.rstrip(".:").replace("|", "\\|"))
    return "".join(part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts)


def table(text: str) -> str:
    rows = [f"| {{py:obj}}`{path}` | {first_sentence(found(path))} |" for path in DOCUMENTED.findall(text)]
    return "\n".join(["| name | |", "|---|---|", *rows])


def add_table(app, docname, source) -> None:
    if docname.startswith("docs/api/") and DOCUMENTED.search(source[0]):
        before, heading, after = source[0].partition("\n## ")
        source[0] = f"{before}\n{table(source[0])}\n{heading}{after}"


def break_names(app, pagename, templatename, context, doctree) -> None:
    """Lets names break between their words, and no option, such as --lora-rank."""
    for part in {"body", "toc"} & {*context}:
        text = context[part].replace('<span class="pre">--', '<span class="pre option">--')
        context[part] = NAME.sub(lambda m: m[1] + BREAK.sub("<wbr>", m[2]), text)


def setup(app):
    app.connect("source-read", add_table)
    app.connect("html-page-context", break_names, priority=100)  # before the theme's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
