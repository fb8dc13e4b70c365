"""Each page of the reference begins with a table of its names: a link, and the first sentence of the docstring.

Long names may break between their words: in tables, in the menu at the right, and everywhere on a telephone. Short
ones and short formulas stay whole, and what a program prints is as large as code where its lines fit.
"""

import html
import importlib
import inspect
import re

DOCUMENTED = re.compile(r"^\.\. auto(?:function|class):: (\S+)$", re.MULTILINE)
NAME = re.compile(r'(<span class="pre">)([^<]+)')
BREAK = re.compile(r"(?:(?<=[./(=])|(?<=[^\W_]_))(?!(?:py|md)\b)(?=[^\W\d_])|(?<=[a-z])(?=[A-Z])")
CODE = re.compile(r'<code class="([^"]*)">(.*?)</code>', re.DOTALL)
PRINTED = re.compile(r"<pre>(.*?)</pre>", re.DOTALL)
NO_TEXT = re.compile(r"(<(pre|code|script|style)\b.*?</\2>|<[^>]+>)", re.DOTALL)
FORMULA = re.compile(r"(?:\b[A-Z]\s)?\S+(?:\s[-+±*/]\s\S+)+|\b(?:Figure|Table)\s\d+|\b\w[\w.]*-\d[\w.]*")
WHOLE, WHOLE_ON_A_SCREEN, AS_LARGE_AS_CODE = 16, 24, 90  # characters
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
    return "\n".join(["| name | in a sentence |", "|---|---|", *rows])


def add_table(app, docname, source) -> None:
    if docname.startswith("docs/api/") and DOCUMENTED.search(source[0]):
        before, heading, after = source[0].partition("\n## ")
        source[0] = f"{before}\n{table(source[0])}\n{heading}{after}"


def columns(text: str) -> int:
    """The longest line of some HTML."""
    return max(map(len, html.unescape(re.sub("<[^>]+>", "", text)).splitlines()), default=0)


def break_code(found: re.Match) -> str:
    """Lets names break between their words, and no option, such as --lora-rank, or short name."""
    kind, inside = found[1], found[2].replace('<span class="pre">--', '<span class="pre option">--')
    if (size := columns(inside)) <= WHOLE_ON_A_SCREEN:
        kind += " whole" if size <= WHOLE else " short"
    if size > WHOLE:
        inside = NAME.sub(lambda m: m[1] + BREAK.sub("<wbr>", m[2]), inside)
    return f'<code class="{kind}">{inside}</code>'


def keep(found: re.Match) -> str:
    """A formula such as (1 + ETA) or 0.1 ± 0.2 in one line, if it is short."""
    return f'<span class="whole">{found[0]}</span>' if len(found[0]) <= WHOLE_ON_A_SCREEN else found[0]


def size_printed(found: re.Match) -> str:
    return f'<pre class="wide">{found[1]}</pre>' if columns(found[1]) > AS_LARGE_AS_CODE else found[0]


def break_names(app, pagename, templatename, context, doctree) -> None:
    if "toc" in context:
        context["toc"] = NAME.sub(lambda m: m[1] + BREAK.sub("<wbr>", m[2]), context["toc"])
    if "body" in context:
        parts = NO_TEXT.split(context["body"])  # text, then an element or a tag, and the name of the element
        parts[::3] = [FORMULA.sub(keep, text) for text in parts[::3]]
        parts[2::3] = [""] * len(parts[2::3])
        body = CODE.sub(break_code, "".join(parts))
        context["body"] = PRINTED.sub(size_printed, body)


def setup(app):
    app.connect("source-read", add_table)
    app.connect("html-page-context", break_names, priority=100)  # before the theme's
    return {"parallel_read_safe": True, "parallel_write_safe": True}
