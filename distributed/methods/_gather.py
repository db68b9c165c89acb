"""Attention over keys of all devices, gathered piece by piece."""

import dataclasses

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import Operands, vary_together

from ._abstract import AbstractMethod, LocalCall, Split
from ._arguments import Axes
from ._gather_keys import Pieces
from ._in_turn import attend_in_turn


@dataclasses.dataclass(frozen=True)
class Gather(AbstractMethod):
    r"""Keys and values are gathered, piece by piece.

    $$\mathrm{state} = \mathrm{state}_{1} \oplus \mathrm{state}_{2} \oplus \dots \oplus \mathrm{state}_{C}$$

    with $\oplus$ the [`merge`][energy_attn.kernels.merge] of states. Queries stay, and keys and values
    are gathered, $C$ pieces of every device's shard one after the other; no gather needs the attention
    over the piece before. A piece has keys of both halves of each shard, so that in the order `"zigzag"` all devices
    have as much to do in each. $C$ is the largest number up to 8 that divides $S$, so that a device holds its shard
    and two pieces of all keys, a quarter of them for long sequences. The same bytes as a ring's, in $C$ steps in place
    of $p - 1$ hops. The derivative gathers them again: in forward mode with the directions of
    keys and values, in reverse mode gradients are reduced and scattered piece by piece in `lse`'s dtype.
    Reverse over either mode keeps the keys of all devices. Positions and segments of keys are gathered once.
    Where a window tells which keys queries see, [no others are sent](../choosing.md#windows).

    In programs for H200 a gather starts before the attention over the piece before and ends after it; in
    the backward the scatter of gradients does, and gathers wait. XLA:TPU's gathers are synchronous: on
    v5p and v6e nothing is computed beside them, while the transfers of a ring are hidden.

    In [`sharded_attention`][energy_attn.distributed.sharded_attention] bias and mask are for this device's queries
    and all keys in the order of the devices, broadcastable to `[B, N, T, p S]`.

    Source: context parallelism of Llama 3 (arXiv 2407.21783, section 3.3.2), which gathers all keys at
        once.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> n = jax.device_count()
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2 * n, 2, 4))
        >>> with jax.set_mesh(make_mesh((n,), ("device",))):
        ...     out = ea.attention(q, k, v, parallel=SequenceParallel("device", "gather"))
        >>> bool(jnp.allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5))
        True
    """

    name = "gather"

    def split(self, axes: Axes, operands: Operands, queries_sharded: bool) -> Split:
        """Each device has its queries, and bias, mask, positions and segments of all keys."""
        del operands, queries_sharded
        return Split(heads=(), queries=axes, keys=(), rows=axes)

    def attend(self, call: LocalCall) -> AttentionState:
        """Raises as `attend` does."""
        operands = vary_together(call.operands, call.axes)
        pieces = Pieces(call.axes, operands.key.shape[1])
        return attend_in_turn(call.names, call.settings, pieces, operands)
