"""The fields of a `config.json`, and of the rotary embedding in it, read and written."""

import inspect
from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import checks

from ..checkpoint._config import check_activation, check_fields, end_tokens, family_of, renaming
from ._rope import DynamicRope, LinearRope, Llama3Rope, LongRope, Rope, YarnRope
from ._variant import FULL, SLIDING, Variant, as_tuple
from ._variants import VARIANTS

# Attributes that every family has in its file, and fields that are read in addition.
_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta"),
    "tie_word_embeddings",
)
_OTHERS = (
    *("model_type", "hidden_act", "hidden_activation", "quantization_config"),
    *("rope_scaling", "rope_parameters"),
)
# Of a file without them, whatever its family.
_DEFAULTS = {"num_hidden_layers": 32, "max_position_embeddings": 2048}


def read_fields(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `LlamaConfig` for the fields of a file; raises as `LlamaConfig.from_json`."""
    variant = family_of(entries, VARIANTS)
    for name in ("hidden_act", "hidden_activation"):
        check_activation(name, entries, variant.activation)
    if (given := entries.get("quantization_config")) is not None:
        method = given.get("quant_method", given) if isinstance(given, Mapping) else given
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
    own = variant.attributes({**{x: entries[x] for x in variant.names if x in entries}, **sizes})
    fields |= {
        "model_type": entries["model_type"],
        "hidden_act": variant.activation,
        **variant.fixed,
        **own,
    }
    fields["rope_local_base_freq"] = local
    original = entries.get(variant.original) if variant.original else None
    scaling = read_scaling(rope, sizes["max_position_embeddings"], original)
    return {**fields, "rope_scaling": scaling}


def write_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the file of a `LlamaConfig` with these attributes; some may be lost."""
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


# The scalings by transformers' names, and the numbers that each has to have.
_KINDS: Mapping[str, tuple[type[Rope], tuple[str, ...]]] = {
    "linear": (LinearRope, ("factor",)),
    "llama3": (Llama3Rope, ("factor", "low_freq_factor", "high_freq_factor")),
    "yarn": (YarnRope, ("factor",)),
    "dynamic": (DynamicRope, ("factor",)),
    "longrope": (LongRope, ("short_factor", "long_factor")),
}
_CONTEXT, _LIMIT = "original_max_position_embeddings", "max_position_embeddings"
# transformers' names of fields that have others here, and fields beside those of a scaling.
_THEIRS = {"scale": "attention_factor"}
_THETA, _PART = "rope_theta", "partial_rotary_factor"
# Sections of positions in images, which are equal in texts.
_BESIDE = ("rope_type", _THETA, _PART, "mrope_section", "mrope_interleaved")
_TEXT = {"mrope": "default"}
# Where a file has the fields of a rotary embedding: transformers 5 has all of them in the second object.
_OBJECTS = ("rope_scaling", "rope_parameters")
# Fields of older kinds, which files of others may have.
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
    found: dict[str, Any] = {}
    local: dict[str, Any] = {}
    for name in _OBJECTS:
        rope = _object(name, entries.get(name))
        if variant.local_theta is not None and {FULL, SLIDING} & rope.keys():
            check_fields(rope, (FULL, SLIDING))  # one for each kind of layers
            _add(local, _named(SLIDING, rope.get(SLIDING), variant))
            rope = _object(FULL, rope.get(FULL))
        _add(found, _named(name, rope, variant))
    found = found or dict(variant.rope)
    _add(found, {x: entries[x] for x in (_THETA, _PART) if entries.get(x) is not None})
    if variant.local_theta is not None:
        base = entries.get("rope_local_base_freq")
        _add(local, {} if base is None else {_THETA: base})
        local.setdefault(_THETA, variant.local_theta)
    kind, part = local.get("rope_type", "default"), local.get(_PART, 1)
    if (kind, part) != ("default", 1):
        given = f"{kind!r}, {_PART} {part}" if part != 1 else repr(kind)
        raise ValueError(f"rope_type: wanted 'default' in {SLIDING!r}, got {given}")
    check_fields(local, (*_BESIDE, *_OLDER))
    return found, local.get(_THETA)


def _named(name: str, given: object, variant: Variant) -> dict[str, Any]:
    """The fields of an object that are not null, with its type under transformers' present name."""
    rope = {x: value for x, value in _object(name, given).items() if value is not None}
    kinds = [rope.pop(x) for x in ("rope_type", "type") if x in rope]
    if kinds:
        kind = kinds[0]
        if not isinstance(kind, str):
            raise TypeError(f"rope_type: wanted a string in {name}, got {checks.received(kind)}")
        rope["rope_type"] = {**_TEXT, **variant.rope_types}.get(kind, kind)
    return rope


def _object(name: str, given: object) -> Mapping[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"{name}: wanted a JSON object, got {checks.received(given)}")
    return given or {}


def _add(found: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if found.setdefault(name, value) != value:
            raise ValueError(
                f"{name}: wanted one value in {', '.join(_OBJECTS)} and beside them, got "
                f"{checks.received(found[name])} and {checks.received(value)}"
            )


def read_scaling(rope: Mapping[str, Any], context: int, original: int | None = None) -> Rope | None:
    """The scaling of a rotary embedding, for a model with this context, and an original one if the file has it."""
    kind = rope.get("rope_type", "default")
    if kind != "default" and kind not in _KINDS:
        names = ", ".join(map(repr, ("default", *_KINDS)))
        raise ValueError(f"rope_type: wanted one of {names}, got {checks.received(kind)}")
    scaling, needed = _KINDS.get(kind, (None, ()))
    own = () if scaling is None else inspect.signature(scaling).parameters
    names = {name: _THEIRS.get(name, name) for name in own}
    check_fields(rope, (*_BESIDE, *_OLDER, *names.values()))
    if scaling is None:
        return None
    for name in needed:
        if rope.get(name) is None:
            raise ValueError(f"rope_scaling: wanted its {name}, got {checks.received(dict(rope))}")
    values = {name: rope[x] for name, x in names.items() if rope.get(x) is not None}
    if _CONTEXT in own:
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
