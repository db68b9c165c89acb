"""Reads HLO text, as `jax.stages.Compiled.as_text()` prints it, and the trip counts of its loops.

    HloModule name, num_partitions=8, ...
    %computation (parameters) -> shape {            # the first to run is marked ENTRY
      [ROOT ]%name = shape opcode(operands), attribute=value, ...
    }

Shapes and attributes are parsed on demand, as only a few of thousands of instructions matter.
"""

import dataclasses
import functools
import json
import math
import operator
import re
from collections.abc import Callable
from typing import Any, Literal

# The kinds of collective operations, as HLO names them.
Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[()\[\]{},]')
_ARRAY = re.compile(r"([a-z]+(\d*)\w*)\[([\d<=, ]*)\](.*)")
_PACKED = re.compile(r"E\((\d+)\)")


def split(text: str, start: int = 0) -> tuple[list[str], int]:
    """Splits a list at its commas outside of brackets, strings and comments.

    Returns the items, without blanks and leading comments, and the index of the bracket that closes the list.
    """
    cuts, depth, end = [start], 0, len(text)
    for token in _TOKEN.finditer(text, start):
        if token[0] in ("(", "[", "{"):
            depth += 1
        elif token[0] in (")", "]", "}"):
            if depth == 0:
                end = token.start()
                break
            depth -= 1
        elif token[0] == "," and depth == 0:
            cuts.append(token.end())
    stops = [cut - 1 for cut in cuts[1:]] + [end]
    items = (text[a:b].strip() for a, b in zip(cuts, stops, strict=True))
    items = (item.partition("*/")[2] if item.startswith("/*") else item for item in items)
    return [item for item in items if item], end


def _pairs(text: str) -> dict[str, str]:
    items, _ = split(text)
    return {key: value for key, _, value in (item.partition("=") for item in items)}


@dataclasses.dataclass(frozen=True)
class ArrayShape:
    """One array of a shape: `f32[8,128]{1,0:T(8,128)}` is `("f32", (8, 128), 4096)`, in bytes."""

    dtype: str
    sizes: tuple[int, ...]
    bytes: int


def arrays(shape: str) -> list[ArrayShape]:
    """The arrays of a shape, tuples flattened, without tokens and opaque values."""
    # Of a layout only E(n) matters, which packs elements to n bits. Without it an element takes whole bytes: an int4 a
    # byte, as XLA counts them. A bounded dynamic size <=n counts as n.
    if shape.startswith(("(", "b(")):
        items, _ = split(shape, shape.index("(") + 1)
        return [array for item in items for array in arrays(item)]
    match = _ARRAY.fullmatch(shape)
    if match is None:
        raise ValueError(f"shape: wanted HLO's dtype[sizes], got {shape!r}")
    dtype, width, sizes, layout = match.groups()
    if dtype in ("token", "opaque"):
        return []
    packed = _PACKED.search(layout)
    bits = int(packed[1]) if packed else 8 * math.ceil(int(width or 8) / 8)  # pred has no width
    dims = tuple(int(size.strip().removeprefix("<=")) for size in sizes.split(",") if size)
    return [ArrayShape(dtype, dims, math.ceil(math.prod(dims) * bits / 8))]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: operands are names or literals, `rest` its attributes as text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @functools.cached_property
    def attributes(self) -> dict[str, str]:
        """`attribute=value` as text, outermost only."""
        return _pairs(self.rest)

    @functools.cached_property
    def frontend_attributes(self) -> dict[str, str]:
        """Attributes from the compiler's front ends, strings without quotes."""
        pairs = _pairs(self.attributes.get("frontend_attributes", "{}")[1:-1])
        return {key: value.strip('"') for key, value in pairs.items()}

    def called(self, *attributes: str) -> list[str]:
        """Names of the computations in `attributes` (`body`, `calls`, ...)."""
        values = [self.attributes.get(attribute, "") for attribute in attributes]
        return [n.lstrip("%") for v in values for n in split(v.removeprefix("{"))[0]]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: its computations, each a dictionary of instructions in the order of the text."""

    replicas: int
    partitions: int
    entry: str
    computations: dict[str, dict[str, Instruction]]
    roots: dict[str, str]


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    shape = split(rest, 1)[1] + 1 if rest.startswith("(") else rest.index(" ")
    opcode = rest.index("(", shape)
    operands, end = split(rest, opcode + 1)
    return Instruction(
        name.lstrip("%"),
        rest[:shape],
        rest[shape:opcode].strip(),
        # Older text repeats the type before the name: `f32[8]{0} %x`.
        tuple(operand.split()[-1].lstrip("%") for operand in operands),
        rest[end + 1 :].lstrip(", "),
    )


def parse(text: str) -> list[Module]:
    """Reads every module of an HLO text; raises `ValueError` where it is none."""
    modules = []
    for part in re.split(r"^(?=HloModule )", text, flags=re.MULTILINE)[1:]:
        header, *lines = part.split("\n")
        entry, computation = "", None
        computations: dict[str, dict[str, Instruction]] = {}
        roots: dict[str, str] = {}
        for line in lines:
            if computation is None:
                if line.endswith("{") and not line[0].isspace():
                    computation = re.split(r"[ (]", line.removeprefix("ENTRY ").lstrip("%"))[0]
                    computations[computation] = {}
                    entry = computation if line.startswith("ENTRY ") else entry
            elif line.startswith("}"):
                computation = None
            elif line.strip():
                try:
                    instruction = _instruction(line)
                except (ValueError, IndexError):
                    raise ValueError(f"text: wanted an HLO instruction, got {line!r}") from None
                computations[computation][instruction.name] = instruction
                if line.lstrip().startswith("ROOT "):
                    roots[computation] = instruction.name
        if not entry:
            raise ValueError(f"text: wanted an ENTRY computation in {header[:60]!r}")
        attributes = _pairs(header)
        replicas, partitions = (
            int(attributes.get(x, "1")) for x in ("replica_count", "num_partitions")
        )
        modules.append(Module(replicas, partitions, entry, computations, roots))
    if not modules:
        raise ValueError(f"text: wanted HLO text, 'HloModule ...', got {text[:60]!r}")
    return modules


# The most steps that are interpreted: seconds of Python.
_STEPS = 1 << 16

_INTEGER = re.compile(r"([su])(\d+)\[")
_COPIES = {"bitcast", "copy", "copy-done", "copy-start", "optimization-barrier", "reshape"}
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "and": operator.and_,
    "maximum": max,
    "minimum": min,
    "multiply": operator.mul,
    "or": operator.or_,
    "subtract": operator.sub,
}


def trip_count(module: Module, computation: str, loop: Instruction) -> int | None:
    """The number of runs of the body of a `while` instruction; None if it depends on data, or is above `_STEPS`."""
    # XLA:CPU and XLA:GPU print it. XLA:TPU does not: there the integers of the loop's state are computed step by step
    # until the condition fails.
    known_trip_count = _config(loop).get("known_trip_count")
    if known_trip_count is not None:
        return int(known_trip_count["n"])
    state = _ComputationCall(module, computation, None).value(loop.operands[0])
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    for step in range(_STEPS):
        goes_on = _ComputationCall(module, condition, (state,)).result()
        if goes_on is None:
            return None
        if not goes_on:
            return step
        state = _ComputationCall(module, body, (state,)).result()
    return None


def _config(instruction: Instruction) -> dict[str, Any]:
    try:
        config = json.loads(instruction.attributes.get("backend_config", "{}"))
        # older text quotes it once more
        config = json.loads(config) if isinstance(config, str) else config
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


@dataclasses.dataclass(frozen=True)
class _ComputationCall:
    """A computation with its arguments, interpreted on demand."""

    # a value is an integer, a tuple of values, or None if it is unknown
    module: Module
    computation: str
    arguments: tuple | None
    values: dict[str, Any] = dataclasses.field(default_factory=dict)

    def result(self) -> Any:
        return self.value(self.module.roots[self.computation])

    def value(self, name: str) -> Any:
        if name not in self.values:
            self.values[name] = self.compute(self.module.computations[self.computation][name])
        return self.values[name]

    def compute(self, x: Instruction) -> Any:
        if x.opcode == "parameter":
            return self.arguments[int(x.operands[0])] if self.arguments is not None else None
        if x.opcode == "constant":
            return _literal(x)
        if x.opcode == "tuple":
            return tuple(map(self.value, x.operands))
        if x.opcode == "get-tuple-element":
            elements = self.value(x.operands[0])
            return elements[int(x.attributes["index"])] if isinstance(elements, tuple) else None
        if x.opcode in _COPIES:
            return self.value(x.operands[0])
        if x.opcode == "convert":
            return _wrapped(x.shape, self.value(x.operands[0]))
        if x.opcode in ("call", "fusion"):
            (called,) = x.called("calls", "to_apply")
            arguments = tuple(map(self.value, x.operands))
            return _ComputationCall(self.module, called, arguments).result()
        operation = _ARITHMETIC.get(x.opcode)
        if x.opcode == "compare":
            operation = getattr(operator, x.attributes["direction"].lower())  # LT, GE, ...
        if operation is None:
            return None
        a, b = map(self.value, x.operands)
        are_known = isinstance(a, int) and isinstance(b, int)
        return _wrapped(x.shape, operation(a, b)) if are_known else None


def _wrapped(shape: str, value: int | None) -> int | None:
    # a value of another dtype, which might be rounded, is unknown
    dtype = _INTEGER.match(shape)
    if dtype is None or value is None:
        return value if shape.startswith("pred") else None
    span = 1 << int(dtype[2])
    low = -span // 2 if dtype[1] == "s" else 0
    return (value - low) % span + low


def _literal(constant: Instruction) -> int | None:
    try:
        (text,) = constant.operands
        return int({"true": "1", "false": "0"}.get(text, text))
    except ValueError:  # an array, or no integer
        return None
