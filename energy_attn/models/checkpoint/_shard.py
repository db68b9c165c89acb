"""The sharding of a model's weights on a mesh."""

import dataclasses
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from energy_attn.kernels.internal import checks

from ..decoder._config import AbstractExperts, AbstractModel

Model = TypeVar("Model", bound=AbstractModel)
Leaf = Array | jax.ShapeDtypeStruct

# Each device has a part of the outputs of these maps, and of the inputs of those that follow, so that attention and
# the MLP each need one all-reduce.
_OUTPUTS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
_INPUTS = ("o_proj", "down_proj")
# Each device has some of the experts.
_EXPERTS = "experts"
# Split by rows, one for each token, so that each device has some of the logits; split by columns, it would have
# partial sums of all logits, the largest array.
_VOCABULARY = ("embed_tokens", "lm_head", "word_embeddings")


def shard(model: Model, mesh: Mesh, *, tensor: str = "tensor") -> Model:
    """A model on a mesh: heads, the width inside the MLP, experts and the vocabulary split, the rest replicated.

    Weights are replicated over all other axes than `tensor`: a cache is sharded over those. The
    vocabulary stays whole where the axis does not divide it. XLA adds the communication: one sum over
    the axis behind attention, and one behind the MLP. `heads` of
    [`SequenceParallel`][energy_attn.distributed.SequenceParallel] keeps the heads split inside attention
    and in a cache, as below; XLA alone may gather them.

    Args:
        model: its arrays may be abstract, as `eqx.filter_eval_shape` returns them.
        mesh: all of its devices get weights.
        tensor: the axis that weights are split over; without it, every device gets all weights.

    Returns:
        The model with its arrays on the mesh. Abstract arrays get the sharding, so that a program can
        be compiled before there are weights.

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
    if not isinstance(model, AbstractModel):
        raise TypeError(f"model: wanted a decoder or an encoder, got {checks.received(model)}")

    def place(leaf: Leaf, sharding: NamedSharding) -> Leaf:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    leaves, tree = jax.tree.flatten(model)
    placed = map(place, leaves, shardings(model, mesh, tensor))
    return along(jax.tree.unflatten(tree, list(placed)), mesh, tensor)


def along(model: Model, mesh: Mesh, tensor: str) -> Model:
    """A decoder whose experts know that they are sharded over an axis, if the mesh has it."""
    axis = tensor if dict(mesh.shape).get(tensor, 1) > 1 else None

    def told(x: Any) -> Any:
        return dataclasses.replace(x, axis=axis) if isinstance(x, AbstractExperts) else x

    return jax.tree.map(told, model, is_leaf=lambda x: isinstance(x, AbstractExperts))


def shardings(model: AbstractModel, mesh: object, tensor: object) -> list[NamedSharding]:
    """The sharding of each leaf of a decoder, whose leaves may be abstract; raises as `shard`."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: wanted a jax.sharding.Mesh, got {checks.received(mesh)}")
    if not isinstance(tensor, str):
        raise TypeError(f"tensor: wanted the name of a mesh axis, got {checks.received(tensor)}")
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

    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        found.append(NamedSharding(mesh, spec(path)))
        if any(
            part == tensor and length % size
            for part, length in zip(found[-1].spec, leaf.shape, strict=False)
        ):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"mesh: wanted an axis {tensor!r} that divides the parts of {name} {leaf.shape}, "
                f"got {size} devices"
            )
    return found
