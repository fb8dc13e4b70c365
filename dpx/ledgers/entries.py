"""The lines of a ledger's file: each is one JSON object that stores floats exactly."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import attrs
from dp_accounting import DpEvent

from dpx.accounting.filters import NOTHING, Spent
from dpx.sampling.schemes import Sampling
from dpx.values import described


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """One release in a ledger, such as a statistic or a whole run, from its reservation on.

    number: int, its index in the ledger. event: its cost, an event of dp-accounting or of dpx. words: what it is.
    date: the UTC date on which it was reserved, such as "2026-01-31". part: name of the part of the data, None for all.
    numbers: int, the most elements in one release of the event. in_integers: whether a TPU may draw its noise.
    marks: ints that tell its keys apart without revealing them. planned: whether it was reserved before anything was
        released. charge: its cost in the unit of the filter; nothing if it was planned.
    made: whether it may have been released. holder: random name of its run's folder, "" for none.
    steps: int, the number of steps after which its run ended, or None. credit: its refund for ending early.
    """

    number: int
    event: DpEvent
    words: str
    date: str
    part: str | None
    numbers: int
    in_integers: bool
    marks: tuple[int, ...]
    planned: bool
    charge: Spent
    made: bool = False
    holder: str = ""
    steps: int | None = None
    credit: Spent = NOTHING

    def reservation_line(self) -> dict[str, Any]:
        """The line of the file that reserves this release."""
        names = ("number", "words", "date", "part", "numbers", "in_integers", "marks", "planned")
        return {name: getattr(self, name) for name in names} | {
            "event": encode_value(self.event),
            "charge": encode_value(self.charge),
        }


def read_entries(lines: list[dict[str, Any]]) -> list[LedgerEntry]:
    """Reads the entries from all lines but the first. Raises ValueError for a line of another kind."""
    entries: list[LedgerEntry] = []
    for line in lines:
        if "event" in line:
            given = line | {"event": decode_value(line["event"]), "charge": Spent(*decode_value(line["charge"]))}
            entries.append(LedgerEntry(**given | {"marks": tuple(line["marks"])}))
            if line["number"] != len(entries) - 1:  # later lines would refer to the wrong entries
                raise ValueError(
                    "the lines of a ledger must be those of one file, in their order, but some are missing or from "
                    f"another ledger: entry {line['number']} is in place {len(entries) - 1}"
                )
        elif "made" in line:
            changes = {"made": True, "holder": line["holder"]}
            entries[line["made"]] = dataclasses.replace(entries[line["made"]], **changes)
        elif "ended" in line:
            changes = {"steps": line["steps"], "credit": Spent(*decode_value(line["credit"]))}
            entries[line["ended"]] = dataclasses.replace(entries[line["ended"]], **changes)
        else:
            raise ValueError(f"every line of a ledger must come from this version of dpx, got one with {sorted(line)}")
    return entries


def encode_value(value: Any) -> Any:
    """Encodes an event, or a value in it, for JSON, with hexadecimal floats. Raises ValueError for other values."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if hasattr(value, "tolist"):
        return encode_value(value.tolist())
    if isinstance(value, list | tuple):
        return [encode_value(part) for part in value]
    if _known_classes().get(type(value).__name__) is type(value):
        return {"type": type(value).__name__} | {name: encode_value(part) for name, part in _fields_to_encode(value)}
    raise ValueError(f"event must hold numbers, words and events, got {described(value)}")


def decode_value(value: Any) -> Any:
    """Inverts `encode_value`; lists and arrays become tuples. Raises ValueError for an unknown class name."""
    if isinstance(value, list):
        return tuple(decode_value(part) for part in value)
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float.fromhex(value["float"])
    if (kind := _known_classes().get(value["type"])) is None:
        raise ValueError(f"every event of a ledger must be known to this version of dpx, got {value['type']!r}")
    return kind(**{name: decode_value(part) for name, part in value.items() if name != "type"})


def _fields_to_encode(value: Any) -> Iterator[tuple[str, Any]]:
    if attrs.has(type(value)):
        return ((field.alias or field.name, getattr(value, field.name)) for field in attrs.fields(type(value)))
    return ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init)


def _known_classes() -> dict[str, type]:
    """All classes that a line may name: events and samplings, by class name."""
    found: dict[str, type] = {}
    left: list[type] = [DpEvent, Sampling]
    while left:
        kind = left.pop()
        # attrs recreates a class to give it slots; the original stays in __subclasses__ until it is garbage-collected.
        if getattr(sys.modules.get(kind.__module__), kind.__name__, kind) is kind:
            found[kind.__name__] = kind
        left += kind.__subclasses__()
    return found
