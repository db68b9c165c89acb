"""Training steps of a small GPT with a window, its tokens sharded over eight simulated devices.

Ours sends the keys that some query may see. It is compared with ours where positions are explicit, so that all keys go
around the ring, and with `jax.nn` as XLA partitions it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

import energy_attn
from energy_attn.distributed import SequenceParallel, make_mesh

from .loops import _training
from .runner import JAX_NN, OURS, Case, Run, Sides, on_mesh

DEVICES, ALL_KEYS = 8, "our ring of all keys"


def sides(dtype: str, layers: int, B: int, T: int, N: int, width: int, window: int) -> Sides:
    """Ours, ours with explicit positions, and `jax.nn` as XLA partitions it."""
    parameters = _training.draw(dtype, layers, T, width)
    tokens = _training.tokens(B, T)
    mesh = make_mesh((DEVICES,), ("device",), devices=jax.devices()[:DEVICES])
    over = NamedSharding(mesh, PartitionSpec(None, "device"))
    parallel = SequenceParallel("device", method="ring")

    def ours(q: Array, k: Array, v: Array, **options: Any) -> Array:
        options |= {"local_window_size": (window - 1, 0), "parallel": parallel}
        return energy_attn.attention(q, k, v, **options)

    def all_keys(q: Array, k: Array, v: Array, **options: Any) -> Array:
        places = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), q.shape[:2])
        return ours(q, k, v, query_positions=places, key_positions=places, **options)

    def xla(q: Array, k: Array, v: Array, **options: Any) -> Array:
        options["local_window_size"] = (window - 1, 0)
        return jax.nn.dot_product_attention(q, k, v, **options)

    def run_of(attend: Callable[..., Array]) -> Run:
        def sharded(q: Array, k: Array, v: Array, **options: Any) -> Array:
            q, k, v = (lax.with_sharding_constraint(x, over) for x in (q, k, v))
            return attend(q, k, v, **options)

        gradient = jax.jit(jax.grad(_training.mean_loss(sharded, N)))
        return on_mesh(mesh, lambda: functools.partial(gradient, parameters, tokens))

    attentions = {OURS: ours, ALL_KEYS: all_keys, JAX_NN: xla}
    return {name: functools.partial(run_of, attend) for name, attend in attentions.items()}


CASES = tuple(
    Case(
        "training step, window",
        "float32",
        {"layers": 2, "B": 1, "T": T, "N": 4, "width": 128, "window": window},
        sides,
    )
    for T, window in ((1024, 128), (4096, 128), (4096, 512), (8192, 512))
)
