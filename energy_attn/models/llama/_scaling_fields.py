"""The scaling of a rotary embedding in a `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import received

from ..checkpoint._fields import check_fields
from ..families._variant import as_tuple
from ._scaling import AbstractRope, LinearRope, Llama3Rope, YarnRope
from ._scaling_by_length import DynamicRope, LongRope

_KINDS: Mapping[str, type[AbstractRope]] = {
    "linear": LinearRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
    "dynamic": DynamicRope,
    "longrope": LongRope,
}
# Numbers that each kind has to have.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "dynamic": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_CONTEXT, _LIMIT = "original_max_position_embeddings", "max_position_embeddings"
# transformers' names of fields that have others here, and fields beside those of a scaling.
_THEIRS = {"scale": "attention_factor"}
_BESIDE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Fields of older kinds, which files of others may have.
_OLDER = ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT)


def rope_entries(scaling: AbstractRope) -> dict[str, Any]:
    """The object of a `config.json`, without what is None."""
    kind = next((name for name, x in _KINDS.items() if type(scaling) is x), None)
    if kind is None:
        raise ValueError(
            f"rope_scaling: wanted one of {', '.join(_KINDS)} in a checkpoint, got {received(scaling)}"
        )
    values = {x.name: getattr(scaling, x.name) for x in _fields(scaling) if x.name != _LIMIT}
    return {"rope_type": kind} | {
        _THEIRS.get(name, name): list(x) if isinstance(x, tuple) else x
        for name, x in values.items()
        if x is not None
    }


def read_scaling(
    rope: Mapping[str, Any], context: int, original: int | None = None
) -> AbstractRope | None:
    """The scaling of a rotary embedding, for a model of that context, and of an original one beside it.

    Raises `ValueError` for one that is unknown or lacks a number, or a field that its kind does not have, and as its
    class.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and kind not in _KINDS:
        names = ", ".join(map(repr, ("default", *_KINDS)))
        raise ValueError(f"rope_type: wanted one of {names}, got {received(kind)}")
    own = [] if kind == "default" else [x.name for x in _fields(_KINDS[kind])]
    names = {name: _THEIRS.get(name, name) for name in own}
    check_fields(rope, (*_BESIDE, *_OLDER, *names.values()))
    if kind == "default":
        return None
    for name in _NEEDED[kind]:
        if rope.get(name) is None:
            raise ValueError(f"rope_scaling: wanted its {name}, got {received(dict(rope))}")
    values = {name: rope[x] for name, x in names.items() if rope.get(x) is not None}
    if _CONTEXT in own:
        values.setdefault(_CONTEXT, context)
        values |= {} if original is None else {_CONTEXT: original}
    if kind == "dynamic":
        values[_LIMIT] = context
    if kind == "longrope":
        lists = {name: as_tuple(name, values[name]) for name in _NEEDED[kind]}
        values = {"factor": context / values[_CONTEXT], **values, **lists}
    return _KINDS[kind](**values)


def _fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)
