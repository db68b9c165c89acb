"""A Llama's weights on a mesh."""

from typing import Any

import jax
from jax.sharding import Mesh

from energy_attn.kernels.internal import received

from ..checkpoint._shard import shardings
from ._llama import Llama


def shard(model: Llama, mesh: Mesh, *, tensor: str = "tensor") -> Llama:
    """A model on a mesh: heads, the width inside the MLP and the vocabulary split, the rest not.

    Over all other axes than `tensor` weights are replicated: a cache is spread over those. A
    vocabulary that the axis does not divide is not split. XLA adds what is sent: a sum over the axis
    behind attention, and one behind the MLP. That heads stay split inside attention and in a cache
    is for `heads` of [`SequenceParallel`][energy_attn.distributed.SequenceParallel] to say, as
    below: XLA alone may gather them.

    Args:
        model: its arrays may be abstract, as `eqx.filter_eval_shape` gives them.
        mesh: all of whose devices get weights.
        tensor: the axis that they are split over; a mesh without it has all on each device.

    Returns:
        The model with its arrays there. Abstract ones have the sharding, so that a program can be
        compiled before there are weights.

    Raises:
        TypeError: `model` is no `Llama`, `mesh` none, or `tensor` no name.
        ValueError: heads or a width that the axis does not divide, or an explicit axis.

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
    if not isinstance(model, Llama):
        raise TypeError(f"model: wanted a Llama, got {received(model)}")

    def place(leaf: Any, sharding: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        return jax.device_put(leaf, sharding)

    leaves, tree = jax.tree.flatten(model)
    return jax.tree.unflatten(tree, list(map(place, leaves, shardings(model, mesh, tensor))))
