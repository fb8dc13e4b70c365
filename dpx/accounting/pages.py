"""A list of sections as plain text, as Markdown, and as a page of HTML."""

import html
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 100  # characters in a line of the plain text

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:48em;margin:2em auto;padding:0 1em}"
    "th,td{text-align:left;vertical-align:top;padding:.2em 1em .2em 0;border-bottom:1px solid #ccc}"
    "table{border-collapse:collapse}th{font-weight:normal;white-space:nowrap}pre{background:#f4f4f4;padding:.6em;overflow:auto}"
    "figure{max-width:36em;margin:1em 0}"
)


class Section(NamedTuple):
    """One section of a page.

    title: of the section. sentences: one paragraph each. rows: (name, value) pairs, a table. code: lines as they are.
    picture: an SVG, which the page of HTML shows.
    """

    title: str
    sentences: tuple[str, ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    code: str = ""
    picture: str = ""


def as_text(title: str, sections: Sequence[Section]) -> str:
    """Lines of at most 100 characters, but for code."""
    lines = [title, "=" * len(title)]
    for section in sections:
        lines += ["", section.title, "-" * len(section.title)]
        for sentence in section.sentences:
            lines += textwrap.wrap(sentence, WIDTH, initial_indent="* ", subsequent_indent="  ", break_on_hyphens=False)
        width = max((len(name) for name, _ in section.rows), default=0)
        for name, value in section.rows:
            first, later = f"{name:{width}}  ", " " * (width + 2)
            lines += textwrap.wrap(value, WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
        lines += section.code.splitlines()
    return "\n".join(lines)


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """A page of Markdown. The words are escaped; of HTML, nothing is left that a browser would read."""
    parts = [f"# {_escaped(title)}"]
    for section in sections:
        parts.append(f"## {_escaped(section.title)}")
        parts.append("\n".join(f"* {_escaped(sentence)}" for sentence in section.sentences))
        rows = [f"| {_escaped(name)} | {_escaped(value)} |" for name, value in section.rows]
        parts.append("\n".join(["| | |", "|---|---|", *rows]) if rows else "")
        parts.append(f"```\n{section.code}\n```" if section.code else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def as_html(title: str, sections: Sequence[Section]) -> str:
    """A whole page of HTML, which loads nothing from elsewhere."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        parts += [f"<p>{html.escape(sentence)}</p>" for sentence in section.sentences]
        parts += [f"<figure>{section.picture}</figure>"] if section.picture else []
        rows = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in section.rows]
        parts += ["<table>", *rows, "</table>"] if rows else []
        parts += [f"<pre>{html.escape(section.code)}</pre>"] if section.code else []
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _escaped(words: str) -> str:
    return re.sub(r"([\\|*<`\[]|\b_|_\b)", r"\\\1", " ".join(words.split()))
