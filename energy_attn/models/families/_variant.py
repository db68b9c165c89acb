"""What a family of decoders has beside a Llama, as its `config.json` says it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from energy_attn.kernels.internal import check_flag, check_integer, received

from ..decoder._stored import Stored

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def _nothing(values: Mapping[str, Any]) -> dict[str, Any]:
    del values
    return {}


def _as_named(config: Any, name: str, shape: tuple[int, ...]) -> Stored:
    del config, shape
    return Stored((name,))


class Variant(NamedTuple):
    """A family whose decoder is a Llama under flags; static.

    Attributes:
        architecture: the name of transformers' class.
        activation: inside the MLP.
        local_theta: the base of the rotary embedding of layers with a window, where a file has none; None: that of all.
        defaults: what transformers has in the place of a missing field.
        fixed: fields of a `LlamaConfig` that all of the family have.
        fields: names in a `config.json` that it has beside those of all families.
        read: fields of a `LlamaConfig` from those names and from the sizes, which have their values or defaults.
        write: those names from the fields of a `LlamaConfig`.
        rope: the rotary embedding of a file that has none.
        rope_types: its types under older names.
        original: the field with the original context, if it has one beside the rotary embedding.
        quantized: how its files may be quantized.
        has_drafting_layers: whether its files may have more layers than the decoder, which draft tokens.
        stored: where a checkpoint has a weight, by the `LlamaConfig` and the weight's name and shape.
    """

    architecture: str
    activation: str = "silu"
    local_theta: float | None = None
    defaults: Mapping[str, Any] = {}
    fixed: Mapping[str, Any] = {}
    fields: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    write: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    rope: Mapping[str, Any] = {}
    rope_types: Mapping[str, str] = {}
    original: str | None = None
    quantized: str | None = None
    has_drafting_layers: bool = False
    stored: Callable[[Any, str, tuple[int, ...]], Stored] = _as_named


def flags(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those of the names that are there."""
    return {name: values[name] for name in names if name in values}


def read_windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """The window, and the layers that have it, of a family where `use_sliding_window` says whether there is one.

    Without `layer_types` it is those from `max_window_layers` on. Raises `ValueError` for a window without a size.
    """
    types, used = read_list(values, "layer_types"), values.get("use_sliding_window")
    if used is None or not check_flag("use_sliding_window", used):
        if any(kind != FULL for kind in types or ()):
            raise ValueError(
                f"layer_types: wanted {FULL!r} without use_sliding_window, got {list(types or ())}"
            )
        return {}
    size = values.get("sliding_window", 4096)
    if size is None:
        return {}
    if types is None:
        first = check_integer("max_window_layers", values.get("max_window_layers", 28), 0)
        layers = range(values["num_hidden_layers"])
        types = tuple(SLIDING if i >= first else FULL for i in layers)
    return {"sliding_window": size, "layer_types": types}


def write_windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `read_windows`."""
    size, types = values["sliding_window"], values["layer_types"]
    layers = values["num_hidden_layers"]
    types = list(types or [FULL if size is None else SLIDING] * layers)
    # transformers takes the layers from this number on where there are no types
    first = types.index(SLIDING) if SLIDING in types else layers
    return {
        "use_sliding_window": size is not None,
        "sliding_window": size,
        "max_window_layers": first,
        "layer_types": types,
    }


def as_tuple(name: str, x: object) -> tuple[Any, ...]:
    """A list of a file, hashable; raises `TypeError` for anything else."""
    if not isinstance(x, list):
        raise TypeError(f"{name}: wanted a list, got {received(x)}")
    return tuple(x)


def read_list(values: Mapping[str, Any], name: str) -> tuple[Any, ...] | None:
    """A list of one entry for each layer as a tuple; None: there is none."""
    x = values.get(name)
    return None if x is None else as_tuple(name, x)
