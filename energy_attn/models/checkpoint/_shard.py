"""Where the weights of a Llama lie on a mesh."""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from energy_attn.kernels.internal import received

from ..llama._config import LlamaConfig

# What each device has a part of: the outputs of these maps, and the inputs of those behind them,
# so that one sum over the devices ends attention, and one the MLP.
_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")
# Rows, a token's each: the logits come in parts. Split the other way each device would have
# partial sums of all of them, the largest array that there is.
_VOCABULARY = ("embed_tokens", "lm_head")


def shardings(model: Any, mesh: Any, tensor: Any) -> list[NamedSharding]:
    """The sharding of each leaf of a Llama, whose leaves may be abstract.

    Raises as `shard`.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: wanted a jax.sharding.Mesh, got {received(mesh)}")
    if not isinstance(tensor, str):
        raise TypeError(f"tensor: wanted the name of a mesh axis, got {received(tensor)}")
    size = dict(mesh.shape).get(tensor, 1)
    _check(model.config, mesh, tensor, size)
    split = tensor if size > 1 else None
    vocabulary = split if model.config.vocab_size % size == 0 else None

    def spec(path: Any, leaf: Any) -> P:
        *_, owner, what = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        if owner in _VOCABULARY:
            return P(vocabulary)
        if owner in _OUTPUTS:
            return P(split)
        return P(None, split) if owner in _INPUTS and what == "weight" else P()

    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [NamedSharding(mesh, spec(path, leaf)) for path, leaf in leaves]


def _check(config: LlamaConfig, mesh: Mesh, tensor: str, size: int) -> None:
    if size == 1:
        return
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise ValueError(
                f"mesh: wanted an axis {tensor!r} that divides {name} {getattr(config, name)}, "
                f"got {size} devices"
            )
    kind = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[tensor]
    if kind != AxisType.Auto:
        raise ValueError(f"mesh: wanted an automatic axis {tensor!r}, got {kind}")
