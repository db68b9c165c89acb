"""Trip counts of the loops of a compiled program.

XLA:CPU and XLA:GPU print the trip count beside the loop. XLA:TPU does not, so there the integers of the loop's
state are computed step by step until its condition fails. Values that depend on an argument are unknown.
"""

import dataclasses
import json
import operator
import re
from collections.abc import Callable
from typing import Any

from ._parse import Instruction, Module

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
    """How often the body of `loop`, a `while` instruction of `computation`, runs.

    `None` where that depends on data, or the counter does not end within `_STEPS`. The condition
    runs once more than the body.
    """
    known_trip_count = _config(loop).get("known_trip_count")
    if known_trip_count is not None:
        return int(known_trip_count["n"])
    state = _ComputationCall(module, computation, None).value(loop.operands[0])
    (condition,), (body,) = loop.called("condition"), loop.called("body")
    for step in range(_STEPS):
        again = _ComputationCall(module, condition, (state,)).result()
        if again is None:
            return None
        if not again:
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
    """A computation with its arguments (`None`: unknown ones), and the values computed so far.

    A value is an integer, a tuple of values, or `None` where it is unknown.
    """

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
    """An integer wrapped around to the dtype of a shape; `None` if it would round."""
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
