"""Renders reports: sections as text, Markdown or HTML, an SVG curve for the HTML page, and the axes of plots."""

import html
import math
import re
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

_LEFT, _TOP, _WIDTH, _HEIGHT = 80, 30, 520, 360  # the plotting area of the SVG, in pixels
_DECADES = 4  # that both axes span; they end at a rate of 1
_LINE, _GUESS = "#0072b2", "#444"  # blue and grey: distinct for the color-blind and in print; guessing is also dotted


def attack_svg(curve: Sequence[tuple[float, float]], unit: str) -> str:
    """Draws an SVG of the largest true-positive rate at each false-positive rate, and of guessing, on logarithmic axes.

    curve: at least two rising pairs (false-positive rate, bound on the true-positive rate), in (0, 1]. Rates below 1e-4
        are not drawn. unit: whom epsilon protects, in words.
    """
    drawn = [pair for pair in curve if min(pair) >= 10.0**-_DECADES]
    points = " ".join(f"{_x_of_rate(wrong):.1f},{_y_of_bound(right):.1f}" for wrong, right in drawn)
    title = html.escape(f"The largest true-positive rate of any attack on one {unit}, at each false-positive rate")
    bottom, right = _TOP + _HEIGHT, _LEFT + _WIDTH
    parts = [f"<title>{title}</title>"]
    for power in range(-_DECADES, 1):
        x, y, words = _x_of_rate(10.0**power), _y_of_bound(10.0**power), f"{100 * 10.0**power:g}%"
        parts.append(f'<path d="M{x:.1f} {_TOP}V{bottom}M{_LEFT} {y:.1f}H{right}" stroke="#ddd" fill="none"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{words}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 5:.1f}" text-anchor="end">{words}</text>')
    dotted = f'stroke="{_GUESS}" stroke-width="1.5" stroke-dasharray="2 5" fill="none"'
    parts.append(f'<path d="M{_LEFT} {bottom}L{right} {_TOP}" {dotted}/>')
    parts.append(f'<polyline points="{points}" stroke="{_LINE}" stroke-width="2.5" fill="none"/>')
    wrong, most = drawn[len(drawn) // 3]
    x, y = _x_of_rate(wrong), _y_of_bound(most) - 8
    parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="end" fill="{_LINE}">any attack</text>')
    parts.append(f'<text x="{_x_of_rate(0.02):.1f}" y="{_y_of_bound(0.02) + 22:.1f}" fill="{_GUESS}">guessing</text>')
    middle = _TOP + _HEIGHT / 2
    parts.append(f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 42}" text-anchor="middle">false-positive rate</text>')
    turned = f'transform="rotate(-90 16 {middle})" text-anchor="middle"'
    parts.append(f'<text x="16" y="{middle}" {turned}>true-positive rate, at most</text>')
    box = f'viewBox="0 0 {right + 30} {bottom + 54}" role="img" font-family="sans-serif" font-size="14"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box} width="100%">{"".join(parts)}</svg>'


def _x_of_rate(rate: float) -> float:
    return _LEFT + _WIDTH * (1 + math.log10(rate) / _DECADES)


def _y_of_bound(rate: float) -> float:
    """Returns the y pixel of a bound, rounded up so that the curve is not drawn below the bound."""
    return math.floor(10 * (_TOP - _HEIGHT * math.log10(rate) / _DECADES)) / 10


WIDTH = 100  # characters in a line of the plain text

_STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:48em;margin:2em auto;padding:0 1em}"
    "th,td{text-align:left;vertical-align:top;padding:.2em 1em .2em 0;border-bottom:1px solid #ccc}"
    "table{border-collapse:collapse}th{font-weight:normal;white-space:nowrap}pre{background:#f4f4f4;padding:.6em;overflow:auto}"
    "figure{max-width:36em;margin:1em 0}summary{font-weight:bold;cursor:pointer;margin:1em 0}"
    ".box{border:2px solid #0072b2;border-radius:.5em;padding:0 1em 1em}"
    "@media(max-width:40em){th{white-space:normal}td{overflow-wrap:anywhere}}"
    "@media print{details::details-content{content-visibility:visible;block-size:auto}}"
)


class Section(NamedTuple):
    """One section of a page.

    title: str. sentences: one paragraph each. rows: (name, value) pairs, shown as a table. code: shown verbatim.
    picture: an SVG, shown only in HTML. form, also only in HTML: "box" draws a frame around the section, and "folded"
    shows only its title until a reader opens it.
    """

    title: str
    sentences: tuple[str, ...] = ()
    rows: tuple[tuple[str, str], ...] = ()
    code: str = ""
    picture: str = ""
    form: Literal["open", "box", "folded"] = "open"


_AROUND = {  # per form: the HTML before a section, the tag of its title, and the HTML after it
    "open": ("", "h2", ""),
    "box": ('<div class="box">', "h2", "</div>"),
    "folded": ("<details>", "summary", "</details>"),
}


def page_as_text(title: str, sections: Sequence[Section]) -> str:
    """Formats a page as plain text, in lines of at most 100 characters, except code."""
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


def page_as_markdown(title: str, sections: Sequence[Section]) -> str:
    """Formats a page as Markdown. Escapes its words, so that a browser finds no HTML in them."""
    parts = [f"# {_escape_markdown(title)}"]
    for section in sections:
        parts.append(f"## {_escape_markdown(section.title)}")
        parts.append("\n".join(f"* {_escape_markdown(sentence)}" for sentence in section.sentences))
        rows = [f"| {_escape_markdown(name)} | {_escape_markdown(value)} |" for name, value in section.rows]
        parts.append("\n".join(["| | |", "|---|---|", *rows]) if rows else "")
        parts.append(f"```\n{section.code}\n```" if section.code else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def page_as_html(title: str, sections: Sequence[Section]) -> str:
    """Formats a complete HTML page that loads nothing from elsewhere."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for section in sections:
        before, heading, behind = _AROUND[section.form]
        parts.append(f"{before}<{heading}>{html.escape(section.title)}</{heading}>")
        parts += [f"<p>{html.escape(sentence)}</p>" for sentence in section.sentences]
        parts += [f"<figure>{section.picture}</figure>"] if section.picture else []
        rows = [f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in section.rows]
        parts += ["<table>", *rows, "</table>"] if rows else []
        parts += [f"<pre>{html.escape(section.code)}</pre>"] if section.code else []
        parts += [behind] if behind else []
    phone = '<meta name="viewport" content="width=device-width">'
    head = f'<meta charset="utf-8">{phone}<title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _escape_markdown(words: str) -> str:
    return re.sub(r"([\\|*<`\[]|\b_|_\b)", r"\\\1", " ".join(words.split()))


# The color-blind can tell Okabe and Ito's colors apart, and the line styles also differ in print.
_COLORS, _LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)))


def labeled_axes(axes: Any, x: str, y: str) -> Any:
    """Labels both axes of a matplotlib plot, or of a new one for None; imports matplotlib only here.

    If the axes are empty, gives curves different colors and line styles, unless the user has set another style cycle.
    """
    import matplotlib

    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(layout="constrained")
    cycle = "axes.prop_cycle"
    if not axes.lines and matplotlib.rcParams[cycle] == matplotlib.rcParamsDefault[cycle]:
        axes.set_prop_cycle(color=_COLORS, linestyle=_LINES)
    axes.set(xlabel=x, ylabel=y)
    return axes


def draw_guessing_line(axes: Any, x: Any, y: Any):
    """Draws a dotted line for an attacker who guesses, once per axes. x, y: float (points,)."""
    if all(line.get_label() != "guessing" for line in axes.lines):
        axes.plot(x, y, "k:", linewidth=1, label="guessing")
    axes.legend()
