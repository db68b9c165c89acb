"""The fields of a `config.json`, read and written."""

from collections.abc import Mapping
from typing import Any

from energy_attn.kernels.internal import received

from ..checkpoint._config import end_tokens
from ..checkpoint._fields import check_activation, check_fields
from ..families._variant import FULL, SLIDING
from ..families._variants import VARIANTS
from ._scaling_fields import read_rope, read_scaling, rope_entries

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
_PART = "partial_rotary_factor"
# Of a file without them, whatever its family.
_LAYERS, _CONTEXT = 32, 2048


def read_fields(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a `LlamaConfig` for the fields of a file; raises as `LlamaConfig.from_json`."""
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in VARIANTS:
        raise ValueError(
            f"model_type: wanted {' or '.join(map(repr, VARIANTS))}, got {received(kind)}"
        )
    variant = VARIANTS[kind]
    for name in ("hidden_act", "hidden_activation"):
        check_activation(name, entries, variant.activation)
    _check_quantization(entries.get("quantization_config"), variant.quantized)
    rope, local = read_rope(entries, variant)
    local_name = () if variant.local_theta is None else ("rope_local_base_freq",)
    read = *_SHARED, *_OTHERS, _PART, "eos_token_id", *variant.fields, *local_name
    check_fields(entries, read)
    fields = {**variant.defaults, **{x: entries[x] for x in _SHARED if entries.get(x) is not None}}
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    fields["eos_token_id"] = end_tokens(entries)
    if _PART in rope:
        if rope[_PART] != 1 and _PART not in variant.fields:
            raise ValueError(f"{_PART}: wanted 1, got {received(rope[_PART])}")
        fields[_PART] = rope[_PART]
    sizes = {"num_hidden_layers": _LAYERS, "max_position_embeddings": _CONTEXT, **fields}
    own = variant.read({**{x: entries[x] for x in variant.fields if x in entries}, **sizes})
    fields |= {"model_type": kind, "hidden_act": variant.activation, **variant.fixed, **own}
    fields["rope_local_base_freq"] = local
    original = entries.get(variant.original) if variant.original else None
    scaling = read_scaling(rope, sizes["max_position_embeddings"], original)
    return {**fields, "rope_scaling": scaling}


def _check_quantization(given: Any, known: str | None) -> None:
    """Raises `ValueError` for weights that are quantized in another way than this one."""
    if given is None:
        return
    method = given.get("quant_method", given) if isinstance(given, Mapping) else given
    if known is None or method != known:
        wanted = "weights that are not quantized" + (f", or by {known!r}" if known else "")
        raise ValueError(f"quantization_config: wanted {wanted}, got {received(method)}")


def write_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the file of a `LlamaConfig` with these attributes; some may be lost."""
    variant = VARIANTS[values["model_type"]]
    entries = {
        "architectures": [variant.architecture],
        "model_type": values["model_type"],
        "hidden_act": values["hidden_act"],
        "rope_scaling": None,
    }
    entries |= {name: values[name] for name in _SHARED} | variant.write(values)
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
