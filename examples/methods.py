"""The methods of a training run, which are those of `dpx.catalog`. The arguments of their builders are its options.

Defaults and help texts come from the builders' signatures and docstrings, so a new method needs no line here.
"""

import inspect
import re
import textwrap
import typing
from typing import Any, Literal, NamedTuple

import optax

import dpx
from dpx import catalog

METHODS = {entry.name: entry for entry in catalog.METHODS}
OF_THE_RUN = (  # arguments that are not options
    *("clip_norm", "noise_multiplier", "sampling", "steps", "key", "basis", "momentum", "learning_rates"),
)


class Option(NamedTuple):
    """One argument of a method on the command line, `--name` with `_` written as `-`; see `read` for its values."""

    default: Any
    help: str


def options(method: str) -> dict[str, Option]:
    """The method's own options, by name."""
    entry = METHODS[method]
    return {
        name: Option(entry.arguments.get(name, parameter.default), explained(entry, name))
        for name, parameter in entry.build_parameters.items()
        if name not in OF_THE_RUN
    }


def options_of(method: str, given: dict[str, Any]) -> dict[str, Any]:
    """The method's options with their defaults filled in; ValueError for an option it does not have."""
    known = options(method)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"method {method!r} has no option {', '.join(unknown)}; its options: {', '.join(known) or 'none'}"
        )
    return {name: given.get(name, option.default) for name, option in known.items()}


def build(method: str, chosen: dict[str, Any], *, steps_per_epoch: int, **of_the_run: Any) -> dpx.Mechanism:
    """The mechanism. chosen: the options, as `read` reads them. of_the_run: all of OF_THE_RUN that is known."""
    entry = METHODS[method]
    values = {name: read(value, of_the_run["steps"], steps_per_epoch) for name, value in chosen.items()}
    return entry.build(**values, **{name: of_the_run[name] for name in OF_THE_RUN if name in entry.build_parameters})


def read(value: Any, steps: int, steps_per_epoch: int) -> Any:
    """The meaning of a word of the command line: a number, none, true or false, a name, or one of

    0..0.7      a schedule, from the first number to the second in equal steps over the run
    0..0.7@80%  the same over that share of the run's steps, after which the second number stays
    10%         that share of the run's steps
    epoch       the steps of an epoch
    """
    if not isinstance(value, str):
        return value
    if value == "epoch":
        return steps_per_epoch
    if ".." in value:
        bounds, _, share = value.partition("@")
        first, last = map(_number, bounds.split("..", 1))
        return optax.linear_schedule(first, last, read(share, steps, steps_per_epoch) if share else steps)
    if value.endswith("%"):
        return max(1, round(_number(value[:-1]) / 100 * steps))
    names = {"none": None, "true": True, "false": False}
    if value.lower() in names:
        return names[value.lower()]
    return value if value.isidentifier() and value != "inf" else _number(value)


def _number(word: str) -> float:
    """An int where it is written as one."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    raise ValueError(f"an option must be a number, a name, FIRST..LAST, SHARE% or epoch, got {word!r}")


def explained(entry: catalog.CatalogEntry, name: str) -> str:
    """One line of help for an argument: its choices, or what the docstring says."""
    choices = typing.get_args(entry.build_parameters[name].annotation)
    if typing.get_origin(entry.build_parameters[name].annotation) is Literal:
        return "one of " + ", ".join(map(str, choices))
    text = inspect.getdoc(entry.build) or ""
    heads = re.findall(r"(?:^|\. +)((?:\w+, )*\w+):\s", text, re.MULTILINE)
    for head in heads:
        if name not in re.findall(r"\w+", head):
            continue
        said = text.split(f"{head}:", 1)[1]
        ends = [said.find(f"{other}:") for other in heads] + [said.find("\n\n"), len(said)]
        said = " ".join(said[: min(end for end in ends if end >= 0)].split())
        said = re.split(r" (?:The rest is as in|Raises ValueError) ", said)[0].rstrip(" .")
        return textwrap.shorten(said, 200)
    return ""
