"""What a compiled program does, read from its HLO text: memory, collectives, products of matrices, estimated cycles.

All sizes are those of one device, because XLA compiles one program for all devices, whose shapes are those of a shard.
What is inside a loop counts once a turn.
"""

import math
import re
from collections.abc import Callable
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
CONDITION = re.compile(r"condition=%?([\w.-]+)")
OPERANDS = re.compile(r"%([\w.-]+)")
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')  # a TPU's compiler writes them
PRODUCTS = ("dot", "convolution", "custom-call")
PASSES = {"default": "DEFAULT", "high": "HIGH", "highest": "HIGHEST"}


class Line(NamedTuple):
    """One instruction of the text. shape: of its result, without the layout. rest: what follows its name."""

    name: str
    shape: str
    operation: str
    rest: str


class Product(NamedTuple):
    """Products of matrices or convolutions that a step makes. algorithm: of its products, such as "f32 HIGHEST" or
    "bf16 DEFAULT". flops: of all turns, two for each multiplication. shape: of its result."""

    algorithm: str
    flops: float
    shape: str


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

    def add(line: Line, turns: int, fused: bool) -> None:
        kind = line.operation.removesuffix("-start")
        source = re.search(r'op_name="([^"]*)"', line.rest)
        buffer = not fused and kind not in NO_BUFFER and not line.operation.endswith("-done")
        sizes = _sizes(line.shape)
        largest = max(sizes, key=lambda one: sizes[one], default="")
        most = sizes.get(largest, 0)
        # An operation that has begun has its operand and its result: the larger one counts.
        whole = most if kind != line.operation else sum(_bytes(one) for one in SHAPE.findall(line.shape))
        found.append(Instruction(kind, largest, most, whole, turns, source.group(1) if source else "", buffer))

    _visit(bodies, entry, lambda _, line, turns, fused: add(line, turns, fused))
    return found


def products(text: str) -> list[Product]:
    """All products of matrices and convolutions that a step runs, from `compiled.as_text()`."""
    bodies, entry = _computations(text)
    found: list[Product] = []

    def add(body: str, line: Line, turns: int, fused: bool) -> None:
        if line.operation in PRODUCTS and (flops := _flops(line, {one.name: one.shape for one in bodies[body]})):
            found.append(Product(_algorithm(line), turns * flops, line.shape))

    _visit(bodies, entry, add)
    return found


def cycles(text: str) -> int:
    """The cycles that a TPU's compiler estimates for a step; loops of a length that is not known count once."""
    bodies, entry = _computations(text)
    found: list[int] = []

    def add(body: str, line: Line, turns: int, fused: bool) -> None:
        if not fused and (estimated := CYCLES.search(line.rest)):
            found.append(turns * int(estimated.group(1)))

    _visit(bodies, entry, add)
    return sum(found)


def traffic(text: str) -> int:
    """The bytes that the instructions of a step read and write. Of an array that is only cut, or written in part, that
    part counts."""
    bodies, entry = _computations(text)
    found: list[int] = []

    def add(body: str, line: Line, turns: int, fused: bool) -> None:
        if fused or line.operation in NO_BUFFER | {"constant"} or line.operation.endswith("-done"):
            return
        shapes = {one.name: one.shape for one in bodies[body]}
        inside, names = [line], dict(enumerate(_operands(line)))
        if line.operation == "fusion":
            inside = [one for name in CALLED.findall(line.rest) for one in bodies[name]]
            names = {int(one.rest.split(")")[0]): one.name for one in inside if one.operation == "parameter"}
        read = [_read(inside, names[i], of) for i, name in enumerate(_operands(line)) if (of := shapes.get(name))]
        found.append(turns * (_written(inside, inside[-1], shapes) + sum(read)))

    _visit(bodies, entry, add)
    return sum(found)


def _read(lines: list[Line], name: str, shape: str) -> int:
    """The bytes that instructions read of the array `name` of this shape."""
    found = 0
    for one in lines:
        places = [place for place, operand in enumerate(_operands(one)) if operand == name]
        if places and one.operation == "bitcast":
            found += _read(lines, one.name, one.shape)
        elif places == [0] and one.operation in ("slice", "dynamic-slice", "gather"):
            found += _total(one.shape)
        elif places and not (places == [0] and one.operation == "dynamic-update-slice"):
            return _total(shape)
    return min(found, _total(shape))


def _written(lines: list[Line], root: Line, shapes: dict[str, str]) -> int:
    """The bytes that instructions write whose result is that of `root`. shapes: of arrays from outside."""
    by_name = {one.name: one for one in lines}
    operands = _operands(root)
    if root.operation in ("tuple", "bitcast") and by_name.keys() >= {*operands}:
        return sum(_written(lines, by_name[name], shapes) for name in operands)
    if root.operation == "dynamic-update-slice":
        update = by_name.get(operands[1])
        return _total(update.shape if update else shapes[operands[1]])
    return _total(root.shape)


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


def _computations(text: str) -> tuple[dict[str, list[Line]], str]:
    """The instructions by computation, and the name of the first computation."""
    bodies: dict[str, list[Line]] = {}
    entry, own = "", []
    for line in text.splitlines():
        if head := HEAD.match(line):
            own = bodies.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif one := LINE.match(line):
            own.append(Line(one.group(1), re.sub(r"\{[^}]*\}", "", one.group(2)), one.group(3), one.group(4)))
    return bodies, entry


def _visit(bodies: dict[str, list[Line]], entry: str, add: Callable[[str, Line, int, bool], None]) -> None:
    """Calls `add(computation, line, turns, whether it is inside a fusion)` for all that a step runs."""

    def visit(name: str, turns: int, fused: bool) -> None:
        for line in bodies.get(name, ()):
            add(name, line, turns, fused)
            if line.operation in ("while", "conditional", "call", "fusion", "async-start"):
                called = CALLED.findall(line.rest)
                for names in BRANCHES.findall(line.rest):
                    called += [one.strip().lstrip("%") for one in names.split(",")]
                inside = turns * (_turns(bodies, line) if line.operation == "while" else 1)
                for one in called:
                    visit(one, inside, fused or line.operation == "fusion")

    visit(entry, 1, False)


def _turns(bodies: dict[str, list[Line]], line: Line) -> int:
    """How often a loop runs; 1 if that is not known. A TPU's text has only the condition, i < n."""
    if known := TURNS.search(line.rest):
        return int(known.group(1))
    condition = CONDITION.search(line.rest)
    lines = bodies.get(condition.group(1), []) if condition else []
    constants = {one.name: one.rest.split(")")[0] for one in lines if one.operation == "constant"}
    for one in lines:
        if one.operation == "compare" and "direction=LT" in one.rest:
            for name in OPERANDS.findall(one.rest.split(")")[0]):
                if constants.get(name, "").isdigit():
                    return int(constants[name])
    return 1


def _flops(line: Line, shapes: dict[str, str]) -> float:
    """Two for each multiplication of a product of matrices, a convolution, or a library's kernel for one; else 0."""
    operands = [_axes(shapes[name]) for name in OPERANDS.findall(line.rest.split(")")[0]) if name in shapes]
    if len(operands) < 2:
        return 0.0
    contracted = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d",]*)[}\]]', line.rest)
    if labels := re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line.rest):
        return _flops_of_convolution(line, operands, labels.groups())
    if contracted is None:
        return 0.0
    axes = [int(axis.strip('"')) for axis in contracted.group(1).split(",") if axis]
    return 2.0 * math.prod(_axes(line.shape)) * math.prod(operands[0][axis] for axis in axes)


def _flops_of_convolution(line: Line, operands: list[list[int]], labels: tuple[str, ...]) -> float:
    """Of the forward form, if cuDNN's kernel is for a gradient of the inputs or of the kernel."""
    result = _axes(line.shape)
    if "BackwardFilter" in line.rest:
        kernel, image = result, operands[1]
    elif "BackwardInput" in line.rest:
        kernel, image = operands[1], operands[0]
    else:
        kernel, image = operands[1], result
    return 2.0 * math.prod(image) * math.prod(kernel) / kernel[labels[1].index("o")]


def _algorithm(line: Line) -> str:
    """The type of the operands, and the named algorithm or the precision that the product asks for."""
    if named := re.search(r'algorithm=(\w+)|"algorithm":"ALG_DOT_(\w+)"', line.rest):
        return str(named.group(1) or named.group(2)).removeprefix("dot_").upper()
    asked = re.search(r'operand_precision[=":]*[{\[]"?(\w+)', line.rest)
    precision = PASSES.get(asked.group(1).lower(), "DEFAULT") if asked else "DEFAULT"
    return f"{line.shape.lstrip('(').split('[')[0]} {precision}"


def _operands(line: Line) -> list[str]:
    return OPERANDS.findall(line.rest.split(")")[0])


def _total(shape: str) -> int:
    """The bytes of all arrays of a shape."""
    return sum(map(_bytes, SHAPE.findall(shape)))


def _axes(shape: str) -> list[int]:
    """The axes of the first array of a shape."""
    first = SHAPE.search(shape)
    return [int(axis) for axis in first.group(2).split(",") if axis] if first else []


def _sizes(shape: str) -> dict[str, int]:
    """The bytes of each array of a shape, by its own shape."""
    return {f"{dtype}[{axes}]": _bytes((dtype, axes)) for dtype, axes in SHAPE.findall(shape)}


def _bytes(array: tuple[str, str]) -> int:
    return BYTES.get(array[0], 4) * math.prod(int(n) for n in array[1].split(",") if n)
