"""The sharding of a model's weights on a mesh."""

import dataclasses
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from ..decoder._config import AbstractExperts, AbstractModel, check_type

Model = TypeVar("Model", bound=AbstractModel)
Leaf = Array | jax.ShapeDtypeStruct

# Column-parallel maps, each followed by a row-parallel one: attention and the MLP need one all-reduce each.
_OUTPUTS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")
_EXPERTS = "experts"
# Split by rows, which are tokens: each device computes some of the logits. Split by columns, it would compute partial
# sums of all logits, the largest array.
_VOCABULARY = ("embed_tokens", "lm_head", "word_embeddings")


def shard(model: Model, mesh: Mesh, *, tensor: str = "tensor") -> Model:
    """Places a model on a mesh: splits heads, inner width, experts and vocabulary, replicates the rest.

    Weights are replicated over all axes but `tensor`; a cache is sharded over the others. The vocabulary stays
    whole if its size is not a multiple of the axis. XLA adds the communication: one all-reduce over the axis
    after attention, and one after the MLP. `heads` of
    [`SequenceParallel`][energy_attn.distributed.SequenceParallel] keeps the heads split inside attention
    and in a cache, as below; without it, XLA may gather them.

    Args:
        model: a decoder or an encoder; its arrays may be abstract, as `eqx.filter_eval_shape` returns them.
        mesh: the devices, all of which get weights.
        tensor: the axis that weights are split over; if the mesh lacks it, every device gets all weights.

    Returns:
        The model with its arrays on the mesh. Abstract arrays get a sharding, so that a program can be compiled
        before weights are read.

    Raises:
        TypeError: `model` is neither a decoder nor an encoder, `mesh` not a mesh, or `tensor` not a name.
        ValueError: the axis does not divide the heads, the width or the experts, or is explicit.

    Source: Shoeybi et al., Megatron-LM (arXiv 1909.08053), section 3.

    Examples:
        >>> import jax
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> from energy_attn.models import Llama, LlamaConfig, shard
        >>> mesh = make_mesh((jax.device_count() // 2, 2), ("sequence", "tensor"))
        >>> config = LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = shard(Llama(config, key=jax.random.key(0)), mesh)
        >>> tuple(model.layers[0].mlp.down_proj.weight.sharding.spec)
        (None, 'tensor')
        >>> with jax.set_mesh(mesh):
        ...     parallel = SequenceParallel("sequence", heads="tensor")
        ...     cache = model.empty_cache(batch=1, slots=16, parallel=parallel)
        >>> cache.parallel.heads
        ('tensor',)
    """
    check_type("model", model, AbstractModel, "a decoder or an encoder")

    def place(leaf: Leaf, sharding: NamedSharding) -> Leaf:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    leaves, tree = jax.tree.flatten(model)
    placed = map(place, leaves, shardings(model, mesh, tensor))
    return along(jax.tree.unflatten(tree, list(placed)), mesh, tensor)


def along(model: Model, mesh: Mesh, tensor: str) -> Model:
    """Sets the mesh axis of a model's experts to `tensor`, if the mesh has that axis."""
    axis = tensor if dict(mesh.shape).get(tensor, 1) > 1 else None

    def with_axis(x: Any) -> Any:
        return dataclasses.replace(x, axis=axis) if isinstance(x, AbstractExperts) else x

    return jax.tree.map(with_axis, model, is_leaf=lambda x: isinstance(x, AbstractExperts))


def shardings(model: AbstractModel, mesh: Any, tensor: Any) -> list[NamedSharding]:
    """Returns the sharding of each leaf of a model, whose leaves may be abstract; raises as `shard`."""
    check_type("mesh", mesh, Mesh, "a jax.sharding.Mesh")
    check_type("tensor", tensor, str, "the name of a mesh axis")
    size = dict(mesh.shape).get(tensor, 1)
    if size > 1:
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if (count := getattr(model.config, name)) % size:
                raise ValueError(
                    f"mesh: wanted an axis {tensor!r} that divides {name} {count}, got {size} devices"
                )
        kind = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[tensor]
        if kind != AxisType.Auto:
            raise ValueError(f"mesh: wanted an automatic axis {tensor!r}, got {kind}")
    split = tensor if size > 1 else None
    vocabulary = split if model.config.vocab_size % size == 0 else None

    def spec(path: tuple[Any, ...]) -> P:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        owner, field = ["", *names][-2:]
        if owner in _VOCABULARY:
            return P(vocabulary)
        if owner in (*_OUTPUTS, _EXPERTS):
            return P(split)
        return P(None, split) if owner in _INPUTS and field == "weight" else P()

    result = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        result.append(NamedSharding(mesh, spec(path)))
        if any(
            part == tensor and length % size
            for part, length in zip(result[-1].spec, leaf.shape, strict=False)
        ):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"mesh: wanted an axis {tensor!r} that divides the parts of {name} {leaf.shape}, "
                f"got {size} devices"
            )
    return result
