"""What a compiled program of several devices keeps on a device and sends between devices, read from its HLO text.

All sizes are bytes on one device, because XLA compiles one program for all devices, whose shapes are those of a shard.
"""

import math
import re
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f64": 8, "s64": 8, "u64": 8, "c64": 8}
# They name memory of other instructions, or hold no array.
NO_BUFFER = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"}
HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
CALLED = re.compile(r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Instruction(NamedTuple):
    """name: of the operation, such as "all-gather". shape, largest: of the largest array of its result, in words and in
    bytes. bytes: int, of all arrays of its result. turns: int, how often a step runs it. source: what it was lowered
    from. buffer: whether its result is in memory."""

    name: str
    shape: str
    largest: int
    bytes: int
    turns: int
    source: str
    buffer: bool


def instructions(text: str) -> list[Instruction]:
    """All instructions that a step runs, from `compiled.as_text()`. One in a loop of unknown length counts once."""
    bodies, entry = _computations(text)
    found: list[Instruction] = []

    def visit(name: str, turns: int, fused: bool) -> None:
        for shape, operation, rest in bodies.get(name, ()):
            kind = operation.removesuffix("-start")
            source = re.search(r'op_name="([^"]*)"', rest)
            buffer = not fused and kind not in NO_BUFFER and not operation.endswith("-done")
            sizes = _sizes(shape)
            largest = max(sizes, key=lambda one: sizes[one], default="")
            most = sizes.get(largest, 0)
            # An operation that has begun has its operand and its result: the larger one counts.
            whole = most if kind != operation else sum(_bytes(one) for one in SHAPE.findall(shape))
            words = source.group(1) if source else ""
            found.append(Instruction(kind, largest, most, whole, turns, words, buffer))
            again = TURNS.search(rest)
            inside = turns * int(again.group(1)) if operation == "while" and again else turns
            called = CALLED.findall(rest)
            for names in BRANCHES.findall(rest):
                called += [one.strip().lstrip("%") for one in names.split(",")]
            if operation in ("while", "conditional", "call", "fusion", "async-start"):
                for one in called:
                    visit(one, inside, fused or operation == "fusion")

    visit(entry, 1, False)
    return found


def collectives(found: list[Instruction]) -> dict[str, tuple[int, int]]:
    """name -> (how many a step runs, bytes of the whole arrays that they make or read on one device)."""
    sums = {}
    for name in COLLECTIVES:
        of_name = [one for one in found if one.name == name]
        sums[name] = sum(one.turns for one in of_name), sum(one.turns * one.bytes for one in of_name)
    return sums


def largest(found: list[Instruction]) -> Instruction:
    """The instruction with the largest result in memory."""
    return max((one for one in found if one.buffer), key=lambda one: one.largest)


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str, str]]], str]:
    """The (shape, operation, rest of the line) of each instruction by computation, and the name of the first one."""
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    entry, own = "", []
    for line in text.splitlines():
        if head := HEAD.match(line):
            own = bodies.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif one := LINE.match(line):
            own.append((re.sub(r"\{[^}]*\}", "", one.group(2)), one.group(3), one.group(4)))
    return bodies, entry


def _sizes(shape: str) -> dict[str, int]:
    """The bytes of each array of a shape, by its own shape."""
    return {f"{dtype}[{axes}]": _bytes((dtype, axes)) for dtype, axes in SHAPE.findall(shape)}


def _bytes(array: tuple[str, str]) -> int:
    return BYTES.get(array[0], 4) * math.prod(int(n) for n in array[1].split(",") if n)
