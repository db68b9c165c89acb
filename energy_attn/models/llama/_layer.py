"""A layer: attention and MLP, their norms, and the residual stream."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.scores import SoftCap

from ..decoder._see import See
from ._attention import LlamaAttention
from ._config import LlamaConfig
from ._experts import RoutedMLP
from ._latent import LatentAttention, attention_scale
from ._layers import LlamaMLP, RMSNorm, norm_of


class LlamaLayer(eqx.Module):
    """Attention and MLP, each after a norm and added to the residual stream; with `post_norms`, normed before that.

    `post_attention_layernorm` is the norm before the MLP, unless there are such norms: these are Hugging Face's names.
    """

    input_layernorm: RMSNorm | None
    self_attn: LlamaAttention | LatentAttention
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm | None
    post_feedforward_layernorm: RMSNorm | None
    mlp: LlamaMLP | RoutedMLP
    options: tuple[tuple[str, Any], ...] = eqx.field(static=True)  # of its attention
    rope: int | None = eqx.field(static=True)  # which rotary embedding it has

    def __init__(self, config: LlamaConfig, index: int, dtype: DTypeLike, *, key: PRNGKeyArray):
        window, cap = config.window(index), config.attn_logit_softcapping
        options: dict[str, Any] = {}
        scale = attention_scale(config)
        if scale is not None:
            options["scale"] = scale
        if window is not None:
            options["local_window_size"] = window - 1, 0
        if cap is not None:
            options["score"] = SoftCap(cap)
        self.options = tuple(options.items())
        local = window is not None and config.rope_local_base_freq is not None
        self.rope = int(local) if config.rotates(index) else None
        attend, mlp = jax.random.split(key)
        norm = partial(norm_of, config, config.hidden_size, dtype)
        before, after = config.pre_norms, config.post_norms
        self.input_layernorm = norm() if before else None
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if before and after else None
        self.post_feedforward_layernorm = norm() if after else None
        projections = LlamaAttention if config.latent is None else LatentAttention
        self.self_attn = projections(config, dtype, key=attend)
        routed = config.routed(index) is not None
        self.mlp = (RoutedMLP if routed else LlamaMLP)(config, dtype, key=mlp)

    def __call__(
        self,
        x: Float[Array, "batch time width"],
        ropes: tuple[tuple[Array, Array], ...],
        see: See,
    ) -> tuple[Float[Array, "batch time width"], Any]:
        """The stream after the layer, and the second result of `see(query, key, value, **options)`."""
        rope = None if self.rope is None else ropes[self.rope]
        heads = see.rows(self._heads, x, rope)
        options = dict(self.options)
        if self.self_attn.sinks is not None:
            options["sink"] = self.self_attn.sinks
        out, extra = see(*heads, **options)
        return see.rows(partial(self._after, parallel=see.parallel), x, out), extra

    def _heads(self, x: Array, rope: tuple[Array, Array] | None) -> tuple:
        return self.self_attn.project(_of(self.input_layernorm, x), rope)

    def _after(self, x: Array, out: Array, parallel: SequenceParallel | None) -> Array:
        """The stream after attention with this output, and after the MLP."""
        out = self.self_attn.o_proj(lax.collapse(out, 2))
        before, after = self.post_attention_layernorm, self.post_feedforward_layernorm
        if after is not None:
            out, before = self.post_attention_layernorm(out), self.pre_feedforward_layernorm
        x = x + out
        routed = isinstance(self.mlp, RoutedMLP)
        mlp = partial(self.mlp, parallel=parallel) if routed else self.mlp
        return x + _of(after, mlp(_of(before, x)))


def _of(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
