"""A reader of XLA's HLO text, as `jax.stages.Compiled.as_text()` prints it.

    HloModule name, num_partitions=8, ...
    %computation (parameters) -> shape {            # the first to run is marked ENTRY
      [ROOT ]%name = shape opcode(operands), attribute=value, ...
    }

`split` handles brackets, strings and comments. Shapes and attributes are parsed on demand, as only a few of
thousands of instructions matter.
"""

import dataclasses
import functools
import math
import re
from typing import Literal

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
    """Cuts a list at its own commas, not at those inside brackets, strings and comments.

    The list ends with the text or at the bracket that closes it. Returns the items, without blanks
    and leading comments, and the index at which the list ended.
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
    """The arrays of a shape, tuples flattened; tokens and opaque values hold none.

    Layouts and tilings are ignored, except that `E(n)` packs elements to n bits; without it an
    element takes whole bytes (XLA's own rule, by which an int4 may take a byte). A bounded dynamic
    size `<=n` counts as n.
    """
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
