"""Reads and writes the fields of a `config.json`, and of the rotary embedding in it."""

import inspect
from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import checks

from ..checkpoint._config import check_activation, check_fields, end_tokens, family_of, renaming
from ..decoder._config import check_type
from ._rope import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope
from ._variant import FULL, SLIDING, Variant, as_tuple
from ._variants import VARIANTS

# Attributes under the same name in the files of all families, and further fields.
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    "tie_word_embeddings",
)
_OTHERS = (
    *("model_type", "hidden_act", "hidden_activation", "quantization_config"),
    *("rope_scaling", "rope_parameters"),
)
# Values of missing fields, in all families.
_DEFAULTS = {"num_hidden_layers": 32, "max_position_embeddings": 2048}


def read_fields(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `LlamaConfig` for the fields of a file; raises as `LlamaConfig.from_json`."""
    variant = family_of(entries, VARIANTS)
    for name in ("hidden_act", "hidden_activation"):
        check_activation(name, entries, variant.activation)
    if (quantized := entries.get("quantization_config")) is not None:
        is_object = isinstance(quantized, Mapping)
        method = quantized.get("quant_method", quantized) if is_object else quantized
        known = variant.quantized
        if known is None or method != known:
            wanted = "weights that are not quantized" + (f", or by {known!r}" if known else "")
            raise ValueError(f"quantization_config: wanted {wanted}, got {checks.received(method)}")
    rope, local = read_rope(entries, variant)
    local_name = () if variant.local_theta is None else ("rope_local_base_freq",)
    read = *_SHARED, *_OTHERS, _PART, "eos_token_id", *variant.names, *local_name
    check_fields(entries, read)
    fields = {**variant.defaults, **{x: entries[x] for x in _SHARED if entries.get(x) is not None}}
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    fields["eos_token_id"] = end_tokens(entries)
    if _PART in rope:
        if rope[_PART] != 1 and _PART not in variant.names:
            raise ValueError(f"{_PART}: wanted 1, got {checks.received(rope[_PART])}")
        fields[_PART] = rope[_PART]
    sizes = {**_DEFAULTS, **fields}
    fields |= {"model_type": entries["model_type"], "hidden_act": variant.activation}
    values = {x: entries[x] for x in variant.names if x in entries}
    fields |= {**variant.fixed, **variant.attributes({**values, **sizes})}
    fields["rope_local_base_freq"] = local
    original = entries.get(variant.original) if variant.original else None
    scaling = read_scaling(rope, sizes["max_position_embeddings"], original)
    return {**fields, "rope_scaling": scaling}


def write_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json` for attributes of a `LlamaConfig`; some attributes may be lost."""
    variant = VARIANTS[values["model_type"]]
    entries = {
        "architectures": [variant.architecture],
        "model_type": values["model_type"],
        "hidden_act": values["hidden_act"],
        "rope_scaling": None,
    }
    entries |= {name: values[name] for name in _SHARED} | variant.entries(values)
    if values["rope_scaling"] is not None:
        entries["rope_scaling"] = rope_entries(values["rope_scaling"])
    default = entries["rope_scaling"] or {"rope_type": "default"}
    entries["rope_parameters"] = {**default, "rope_theta": values["rope_theta"]}
    if values[_PART] != 1:
        entries[_PART] = entries["rope_parameters"][_PART] = values[_PART]
    if variant.activation != "silu":
        entries["hidden_activation"] = values["hidden_act"]
    local = values["rope_local_base_freq"]
    if local is not None:
        entries["rope_local_base_freq"] = local
        entries["rope_parameters"] = {
            FULL: entries["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local},
        }
    # null, as transformers has default tokens for missing fields
    ends = list(values["eos_token_id"]) or None
    return entries | {"bos_token_id": None, "pad_token_id": None, "eos_token_id": ends}


# The scalings by transformers' names, and the required fields of each.
_KINDS: Mapping[str, tuple[type[Rope], tuple[str, ...]]] = {
    "linear": (LinearRope, ("factor",)),
    "llama3": (Llama3Rope, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": (YarnRope, ("factor",)),
    "dynamic": (DynamicRope, ("factor",)),
    "longrope": (LongRope, ("short_factor", "long_factor")),
}
_CONTEXT, _LIMIT = "original_max_position_embeddings", "max_position_embeddings"
# transformers' names for fields of other names here.
_THEIRS = {"scale": "attention_factor"}
_THETA, _PART = "rope_theta", "partial_rotary_factor"
# Fields of all scalings. The sections are for positions in images, which are equal in texts.
_BESIDE = ("rope_type", _THETA, _PART, "mrope_section", "mrope_interleaved")
_TEXT = {"mrope": "default"}
# The objects of a file that have fields of a rotary embedding; transformers 5 has all of them in the second.
_OBJECTS = ("rope_scaling", "rope_parameters")
# Fields of some scalings that files may have beside any other.
_OLDER = ("factor", "low_freq_factor", "high_freq_factor", _CONTEXT)


def rope_entries(scaling: Rope) -> dict[str, Any]:
    kind = next((name for name, (x, _) in _KINDS.items() if type(scaling) is x), None)
    if kind is None:
        raise ValueError(
            f"rope_scaling: wanted one of {', '.join(_KINDS)} in a checkpoint, got {checks.received(scaling)}"
        )
    return {"rope_type": kind} | {
        _THEIRS.get(name, name): list(x) if isinstance(x, tuple) else x
        for name, x in vars(scaling).items()
        if x is not None and name != _LIMIT
    }


def read_rope(entries: Mapping[str, Any], variant: Variant) -> tuple[dict[str, Any], Any]:
    """The fields of a file's rotary embedding, and the base in layers with a window."""
    fields: dict[str, Any] = {}
    local: dict[str, Any] = {}
    for name in _OBJECTS:
        rope = _object(name, entries.get(name))
        if variant.local_theta is not None and {FULL, SLIDING} & rope.keys():
            check_fields(rope, (FULL, SLIDING))  # one for each kind of layers
            _add(local, _named(SLIDING, rope.get(SLIDING), variant))
            rope = _object(FULL, rope.get(FULL))
        _add(fields, _named(name, rope, variant))
    fields = fields or dict(variant.rope)
    _add(fields, {x: entries[x] for x in (_THETA, _PART) if entries.get(x) is not None})
    if variant.local_theta is not None:
        base = entries.get("rope_local_base_freq")
        _add(local, {} if base is None else {_THETA: base})
        local.setdefault(_THETA, variant.local_theta)
    kind, part = local.get("rope_type", "default"), local.get(_PART, 1)
    if (kind, part) != ("default", 1):
        shown = f"{kind!r}, {_PART} {part}" if part != 1 else repr(kind)
        raise ValueError(f"rope_type: wanted 'default' in {SLIDING!r}, got {shown}")
    check_fields(local, (*_BESIDE, *_OLDER))
    return fields, local.get(_THETA)


def _named(name: str, rope: object, variant: Variant) -> dict[str, Any]:
    """The fields of an object that are not null, with its type under transformers' present name."""
    rope = {x: value for x, value in _object(name, rope).items() if value is not None}
    kinds = [rope.pop(x) for x in ("rope_type", "type") if x in rope]
    if kinds:
        kind = kinds[0]
        check_type("rope_type", kind, str, f"a string in {name}")
        rope["rope_type"] = {**_TEXT, **variant.rope_types}.get(kind, kind)
    return rope


def _object(name: str, x: Any) -> Mapping[str, Any]:
    check_type(name, x, Mapping | None, "a JSON object")
    return x or {}


def _add(fields: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if fields.setdefault(name, value) != value:
            raise ValueError(
                f"{name}: wanted one value in {', '.join(_OBJECTS)} and beside them, got "
                f"{checks.received(fields[name])} and {checks.received(value)}"
            )


def read_scaling(rope: Mapping[str, Any], context: int, original: int | None = None) -> Rope | None:
    """The scaling of a rotary embedding, for a model with this context; `original`: the context before scaling."""
    kind = rope.get("rope_type", "default")
    if kind != "default" and kind not in _KINDS:
        names = ", ".join(map(repr, ("default", *_KINDS)))
        raise ValueError(f"rope_type: wanted one of {names}, got {checks.received(kind)}")
    scaling, needed = _KINDS.get(kind, (None, ()))
    parameters = () if scaling is None else inspect.signature(scaling).parameters
    names = {name: _THEIRS.get(name, name) for name in parameters}
    check_fields(rope, (*_BESIDE, *_OLDER, *names.values()))
    if scaling is None:
        return None
    for name in needed:
        if rope.get(name) is None:
            raise ValueError(f"rope_scaling: wanted its {name}, got {checks.received(dict(rope))}")
    values = {name: rope[x] for name, x in names.items() if rope.get(x) is not None}
    if _CONTEXT in parameters:
        values.setdefault(_CONTEXT, context)
        values |= {} if original is None else {_CONTEXT: original}
    if kind == "dynamic":
        values[_LIMIT] = context
    if kind == "longrope":
        lists = {name: as_tuple(name, values[name]) for name in needed}
        original = checks.check_integer(_CONTEXT, values[_CONTEXT], 1)
        values = {"factor": context / original, **values, **lists}
    with renaming(_THEIRS):
        return scaling(**values)
