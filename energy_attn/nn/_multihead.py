"""Multi-head attention as an Equinox module, each head the gradient of a free energy."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from energy_attn.kernels.internal import checks, join_masks
from energy_attn.kernels.masks import AbstractMask

from ..core._module import FreeEnergy, attention_with_dropout, energy_of
from ..functional._free_energy import ModuleOptions


class LayerOptions(TypedDict, total=False):
    """The options of a call of a layer."""

    key: PRNGKeyArray | None
    """A `jax.random.key` for dropout."""

    inference: bool | None
    """Overrides the field of the same name in `dropout`."""

    deterministic: bool | None
    """Deprecated name of `inference`, as in Equinox; warns."""

    process_heads: Callable[..., Sequence[Array]] | None
    """Maps `(query, key, value)` heads, `[T, num_heads, qk_size]`, `[S, num_kv_heads, qk_size]`,
    `[S, num_kv_heads, vo_size]`, to new ones of the same shapes, for example with rotary embeddings."""

    query_positions: Int[Array, " T"] | None
    """`[T]` integers for causality and windows; negative means absent."""

    key_positions: Int[Array, " S"] | None
    """`[S]` integers, as `query_positions`."""


class MultiheadAttention(eqx.Module):
    r"""Multi-head attention, each head the gradient of a free energy.

    $$\mathrm{MultiheadAttention}(Q, K, V) = \sum_h \nabla F_h\; W^O_h, \qquad
      F_h(\zeta) = \log \sum_a \exp(\mathrm{scale}\; Q W^Q_h \cdot K_a W^K_h
      + \zeta \cdot V_a W^V_h)$$

    A drop-in replacement for `equinox.nn.MultiheadAttention`: the constructor and the call accept
    the same arguments, parameters have the same names and shapes, and equal weights give equal
    outputs (except in fully masked rows, which are zero before the output projection). It adds
    grouped heads, causality, windows and positions, sharded keys, and the energies.

    Args:
        num_heads: the number of query heads.
        query_size: the width of `query`.
        key_size: the width of `key_`; `query_size` if None.
        value_size: the width of `value`; `query_size` if None.
        output_size: the width of the result; `query_size` if None.
        qk_size: the width of queries and keys in a head; `query_size // num_heads` if None.
        vo_size: the width of values in a head; `query_size // num_heads` if None.
        use_query_bias: whether the query projection has a bias; likewise `use_key_bias`, `use_value_bias` and
            `use_output_bias`.
        dropout_p: the probability that an attention weight is dropped.
        inference: whether dropout is off; `equinox.nn.inference_mode` toggles it.
        dtype: of the parameters; JAX's default floating dtype if None.
        num_kv_heads: the number of key/value heads, a divisor of `num_heads`; `num_heads` if None.
        energy: the [`FreeEnergy`][energy_attn.FreeEnergy] of every head.
        key: a `jax.random.key` for the initial parameters.
        **options: instead of `energy`, the options of one.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes that are not positive, a `num_kv_heads` that does not divide `num_heads`,
            a `dropout_p` that is not a probability, or options in addition to an `energy`.

    Source: Tree Attention (arXiv 2408.04093), equations 16 to 20.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> x = jnp.ones((7, 16))
        >>> layer = ea.nn.MultiheadAttention(4, 16, num_kv_heads=2, is_causal=True, key=jax.random.key(0))
        >>> out, energy = layer(x, x, x, return_energy=True)
        >>> out.shape, energy.shape
        ((7, 16), (7, 4))
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    energy: FreeEnergy
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    query_size: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)
    output_size: int = eqx.field(static=True)
    qk_size: int = eqx.field(static=True)
    vo_size: int = eqx.field(static=True)
    use_query_bias: bool = eqx.field(static=True)
    use_key_bias: bool = eqx.field(static=True)
    use_value_bias: bool = eqx.field(static=True)
    use_output_bias: bool = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        *,
        num_kv_heads: int | None = None,
        energy: FreeEnergy | None = None,
        key: PRNGKeyArray,
        **options: Unpack[ModuleOptions],
    ) -> None:
        def size_of(name: str, size: int | None, otherwise: int) -> int:
            return checks.check_integer(name, otherwise if size is None else size, least=1)

        num_heads = checks.check_integer("num_heads", num_heads, least=1)
        num_kv_heads = size_of("num_kv_heads", num_kv_heads, num_heads)
        if num_heads % num_kv_heads != 0:
            raise ValueError(
                f"num_kv_heads: wanted a divisor of num_heads = {num_heads}, got {num_kv_heads}"
            )
        if not 0 <= checks.check_finite_number("dropout_p", dropout_p) <= 1:
            raise ValueError(f"dropout_p: wanted a probability, got {dropout_p}")
        dtype = None if dtype is None else checks.check_floating_dtype("dtype", dtype)
        self.energy = energy_of(energy, options)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        # a head has the width query_size // num_heads by default
        least = num_heads if qk_size is None or vo_size is None else 1
        self.query_size = query_size = checks.check_integer("query_size", query_size, least)
        self.key_size = size_of("key_size", key_size, query_size)
        self.value_size = size_of("value_size", value_size, query_size)
        self.output_size = size_of("output_size", output_size, query_size)
        self.qk_size = size_of("qk_size", qk_size, query_size // num_heads)
        self.vo_size = size_of("vo_size", vo_size, query_size // num_heads)
        self.use_query_bias = checks.check_flag("use_query_bias", use_query_bias)
        self.use_key_bias = checks.check_flag("use_key_bias", use_key_bias)
        self.use_value_bias = checks.check_flag("use_value_bias", use_value_bias)
        self.use_output_bias = checks.check_flag("use_output_bias", use_output_bias)
        # in the order of Equinox, so that equal keys give equal parameters
        seeds = jax.random.split(checks.check_key("key", key), 4)
        linear = functools.partial(eqx.nn.Linear, dtype=dtype)
        queries, results = num_heads * self.qk_size, num_heads * self.vo_size
        keys, values = num_kv_heads * self.qk_size, num_kv_heads * self.vo_size
        self.query_proj = linear(query_size, queries, use_query_bias, key=seeds[0])
        self.key_proj = linear(self.key_size, keys, use_key_bias, key=seeds[1])
        self.value_proj = linear(self.value_size, values, use_value_bias, key=seeds[2])
        self.output_proj = linear(results, self.output_size, use_output_bias, key=seeds[3])
        self.dropout = eqx.nn.Dropout(
            dropout_p, inference=checks.check_flag("inference", inference)
        )

    @overload
    def __call__(
        self,
        query: Float[Array, "T query_size"],
        key_: Float[Array, "S key_size"],
        value: Float[Array, "S value_size"],
        mask: Shaped[Array, "..."] | AbstractMask | None = None,
        *,
        return_energy: Literal[False] = False,
        **options: Unpack[LayerOptions],
    ) -> Float[Array, "T output_size"]: ...

    @overload
    def __call__(
        self,
        query: Float[Array, "T query_size"],
        key_: Float[Array, "S key_size"],
        value: Float[Array, "S value_size"],
        mask: Shaped[Array, "..."] | AbstractMask | None = None,
        *,
        return_energy: Literal[True],
        **options: Unpack[LayerOptions],
    ) -> tuple[Float[Array, "T output_size"], Float[Array, "T num_heads"]]: ...

    def __call__(
        self,
        query: Float[Array, "T query_size"],
        key_: Float[Array, "S key_size"],
        value: Float[Array, "S value_size"],
        mask: Shaped[Array, "..."] | AbstractMask | None = None,
        *,
        return_energy: bool = False,
        **options: Unpack[LayerOptions],
    ) -> (
        Float[Array, "T output_size"]
        | tuple[Float[Array, "T output_size"], Float[Array, "T num_heads"]]
    ):
        """Attends; use `jax.vmap` for a batch.

        Args:
            query: `[T, query_size]`.
            key_: `[S, key_size]`.
            value: `[S, value_size]`.
            mask: `[T, S]` or `[num_heads, T, S]`, booleans or numbers: False or zero hides a key, as in Equinox;
                or a mask of `energy_attn.masks`.
            return_energy: whether to return `(out, energy)`.
            **options: options of dropout, and positions of queries and keys.

        Returns:
            `[T, output_size]`; with `return_energy`, also energies `[T, num_heads]` in nats
            (before dropout).

        Raises:
            TypeError: an argument is not an array or has the wrong dtype; an option of the layer's energy, or an
                unknown argument.
            ValueError: shapes that do not match; a mask of scores to add, with negative numbers, where it is known.
            RuntimeError: dropout is on but no key is given.
        """
        if unknown := options.keys() - LayerOptions.__annotations__.keys():
            name = min(unknown)
            if name in ModuleOptions.__annotations__:
                raise TypeError(
                    f"{name}: wanted it where the layer is made, as MultiheadAttention(..., {name}=...) or "
                    f"replace_attention(model, {name}=...), got it in a call"
                )
            names = ", ".join(LayerOptions.__annotations__)
            raise TypeError(f"{name}: wanted mask, {names}, return_energy, got {name!r}")
        inference, deterministic = options.get("inference"), options.get("deterministic")
        if deterministic is not None:
            warnings.warn("deterministic: use inference instead", DeprecationWarning, stacklevel=2)
            inference = deterministic
        checks.check_flag("return_energy", return_energy)
        if not (mask is None or isinstance(mask, AbstractMask)):
            mask = checks.as_visible("mask", mask)
        process_heads = options.get("process_heads")
        heads = self.project(query, key_, value, mask=mask, process_heads=process_heads)
        rows: Any = {name: options.get(name) for name in ("query_positions", "key_positions")}
        attend = self.energy
        if isinstance(mask, AbstractMask):
            attend, mask = dataclasses.replace(attend, mask=join_masks(attend.mask, mask)), None
        if inference is None:
            inference = self.dropout.inference
        else:
            checks.check_flag("inference", inference)
        if inference or self.dropout.p == 0:
            out, energy = attend.attention(*heads, mask=mask, return_energy=True, **rows)
        else:
            key, chance = options.get("key"), 1 - self.dropout.p
            if key is None:
                raise RuntimeError("key: wanted a jax.random.key, as dropout is on; got None")
            # random keys as in Equinox, one per head
            shape = (self.num_heads, query.shape[0], key_.shape[0])
            keep = jax.vmap(lambda key: jax.random.bernoulli(key, chance, shape[1:]))(
                jax.random.split(checks.check_key("key", key), self.num_heads)
            )
            mask = None if mask is None else jnp.broadcast_to(mask, shape)
            out, energy = attention_with_dropout(attend, *heads, None, mask, keep, chance, rows)
        out = jax.vmap(self.output_proj)(out.reshape(query.shape[0], self.num_heads * self.vo_size))
        return (out, energy) if return_energy else out

    def project(
        self,
        query: Float[Array, "T query_size"],
        key_: Float[Array, "S key_size"],
        value: Float[Array, "S value_size"],
        *,
        mask: Shaped[Array, "..."] | AbstractMask | None = None,
        process_heads: Callable[..., Sequence[Array]] | None = None,
    ) -> tuple[Array, Array, Array]:
        """Returns the projected heads of a call, the arguments of `layer.energy.at(...)`.

        Arguments and errors as in a call; `mask` is checked and otherwise unused.

        Returns:
            Queries `[T, num_heads, qk_size]`, keys `[S, num_kv_heads, qk_size]` and values
            `[S, num_kv_heads, vo_size]`.
        """
        for name, x, width in (
            ("query", query, self.query_size),
            ("key_", key_, self.key_size),
            ("value", value, self.value_size),
        ):
            checks.check_shape(name, checks.check_floating(name, x), ("length", width))
        checks.check_shape("value", value, (key_.shape[0], self.value_size))
        if not (mask is None or isinstance(mask, AbstractMask)):
            scores = (self.num_heads, query.shape[0], key_.shape[0])
            checks.check_broadcastable(
                "mask", checks.as_visible("mask", mask), scores, leading=False
            )
        heads = (
            _project(self.query_proj, query, self.num_heads),
            _project(self.key_proj, key_, self.num_kv_heads),
            _project(self.value_proj, value, self.num_kv_heads),
        )
        if process_heads is None:
            return heads
        if not callable(process_heads):
            raise TypeError(
                f"process_heads: wanted a function, got {checks.received(process_heads)}"
            )
        processed = process_heads(*heads)
        if not isinstance(processed, Iterable):
            raise TypeError(f"process_heads: wanted three arrays, got {checks.received(processed)}")
        processed = tuple(checks.check_floating("process_heads", x) for x in processed)
        shapes, expected = ([x.shape for x in group] for group in (processed, heads))
        if shapes != expected:
            raise ValueError(f"process_heads: wanted shapes {expected} back, got {shapes}")
        query, key_, value = processed
        return query, key_, value


def _project(linear: eqx.nn.Linear, x: Array, heads: int) -> Array:
    projected = jax.vmap(linear)(x)
    return projected.reshape(x.shape[0], heads, projected.shape[1] // heads)
