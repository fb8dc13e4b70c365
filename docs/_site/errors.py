"""`python -m docs._site.errors > docs/errors.md`: how dpx's errors and warnings begin, and the ways out."""

import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from docs._site.messages import WARNING, messages

INTRODUCTION = """# Error messages and warnings

dpx refuses a run whose epsilon would not hold. Each message states what is required, and what was given. To find yours,
search this page for its first words, and skip any that are filled in (a name, a number). A `UserWarning` lets the run
continue, because dpx cannot tell whether there is a mistake. No message can warn about [sharp edges](sharp_edges.md).
"""
SHOWN = 5  # words of a message
SELF_EXPLAINED = "Other arguments"  # the group whose messages say all that there is to say


class WayOut(NamedTuple):
    group: str
    heading: str
    text: str
    patterns: list[str]


def ways_out() -> list[WayOut]:
    found, group = [], ""
    for line in Path(__file__).with_name("ways_out.txt").read_text().splitlines():
        sign, _, rest = line.partition(" ")
        if sign == "==":
            group = rest
        elif sign == "=":
            found.append(WayOut(group, rest, "", []))
        elif sign == "?":
            found[-1].patterns.append(rest)
        elif line and sign != "#":
            found[-1] = found[-1]._replace(text=f"{found[-1].text} {line}".strip())
    return found


def placed() -> list[tuple[WayOut, list[str]]]:
    """Each way out with its messages. Raises LookupError for a message that no pattern fits."""
    found: list[tuple[WayOut, list[str]]] = [(way, []) for way in ways_out()]
    seen = set()
    for file, message in messages():
        fits = (own for way, own in found if any(re.search(p, f"{file}: {message}") for p in way.patterns))
        own = next(fits, None)
        if own is None:
            raise LookupError(f"docs/_site/ways_out.txt has no way out for {message!r} of {file}")
        if message not in seen:
            own.append(message)
        seen.add(message)
    return found


def beginning(message: str) -> str:
    """The first words of a message after what is filled in, which a reader can search for; "" if there are none."""
    sign = WARNING if message.startswith(WARNING) else ""
    parts = (re.sub(r"^\W+", "", part).split(" ") for part in message.removeprefix(sign).split("..."))
    cut = [" ".join(words[:SHOWN]).rstrip(" ,:;('\"=") for words in parts]
    return next((sign + words for least in (2, 1) for words in cut if words.count(" ") >= least), "")


def page() -> str:
    lines, group = [INTRODUCTION], None
    for way, own in placed():
        if way.group != group:
            group = way.group
            lines += [f"## {group}", ""]
        lines += [f"### {way.heading}", "", *textwrap.wrap(way.text, 120, break_on_hyphens=False), ""]
        shown = [] if group == SELF_EXPLAINED else list(dict.fromkeys(filter(None, map(beginning, own))))
        lines += ["```text", *shown, "```", ""] if shown else []
    return "\n".join([*lines, "Next: [all methods](methods.md).", ""])


if __name__ == "__main__":
    sys.stdout.write(page())
