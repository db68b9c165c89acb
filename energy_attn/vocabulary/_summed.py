"""Sums of the losses of tokens, whose gradients are computed with their values in chunks of tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from energy_attn.kernels.internal import autodiff, checks, lse_dtype, mesh_axes

from ._blocks import Block, BlockSize, CotangentTerm, Sums, WordBlocks
from ._evaluate import OutputLayer, dense_logits, static_layer
from ._parallel import over_devices, plan_of
from ._tiles import ordered_sum

_MOST = 1 << 24  # logits of a chunk
_LEAST = 512  # tokens in a chunk: each chunk reads and writes the gradient of the output matrix


def sum_over_tokens(f: Callable[..., Array], *args: PyTree) -> Float[Array, ""]:
    r"""The sum of a loss over all tokens, with its gradient from the same pass.

    $$L = \sum_t f(p_t, q_t, \dots, x_t, \dots)$$

    It is `f(*args).sum()`, and faster in training: distributions and losses are computed in chunks of tokens, and each
    chunk's gradient with its value. All statistics of a chunk share its logits, which are not computed again. A
    cross-entropy takes three matrix products, as with an array of logits, and not four. In 16 bits, and where words
    are sharded, it is `f(*args).sum()` in blocks of words.

    Args:
        f: a loss of each token on its own, from `args` with any leading axes to an array with these axes.
        *args: trees of at least one [`Categorical`][energy_attn.Categorical] and of arrays, all with the same leading
            axes of tokens.

    Returns:
        A number, differentiable to any order in both modes.

    Raises:
        TypeError: an argument that is no array, or no `Categorical` among them.
        ValueError: leading axes that differ, distributions with another `parallel`, a result of another shape, or an
            `f` that takes traced arrays from elsewhere.

    Source: Liger kernels (arXiv 2410.10989), section 3.2, for gradients that are computed with the values.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> keys = jax.random.split(jax.random.key(0), 3)
        >>> weight, hidden = jax.random.normal(keys[0], (500, 8)), jax.random.normal(keys[1], (6, 8))
        >>> reference = ea.Categorical(jax.random.normal(keys[2], (6, 8)), weight)
        >>> def loss(policy, reference):
        ...     return policy.kl_divergence(reference) - 0.01 * policy.entropy()
        >>> def total(hidden):
        ...     return ea.sum_over_tokens(loss, ea.Categorical(hidden, weight), reference)
        >>> value, slope = jax.jit(jax.value_and_grad(total))(hidden)
        >>> bool(jnp.allclose(value, loss(ea.Categorical(hidden, weight), reference).sum(), rtol=1e-4))
        True
    """
    layers = [x for x in jax.tree.leaves(args, is_leaf=_is_layer) if _is_layer(x)]
    if not layers:
        raise TypeError("args: wanted at least one Categorical, got none")
    first = layers[0]
    shape = first.hidden.shape[:-1]
    for x in jax.tree.leaves(args, is_leaf=_is_layer):
        _check_argument(x, shape, first)
    autodiff.check_closure(jax.make_jaxpr(f)(*args))
    return summed(f, *args)


def summed(f: Callable[..., Array], *args: PyTree) -> Float[Array, ""]:
    """The sum over tokens of an `f` and arguments that are known to fit."""
    layers = [x for x in jax.tree.leaves(args, is_leaf=_is_layer) if _is_layer(x)]
    first, shape = layers[0], layers[0].hidden.shape[:-1]
    if not _is_in_chunks(layers):
        losses = _check_losses(f(*args), shape)
        return ordered_sum(losses) if first.reproducible else losses.sum()
    parts, form = jax.tree.flatten(args, is_leaf=_is_layer)
    kinds = tuple(_Kind.of(x) for x in parts)
    tokens = [_arrays(x, ("hidden", "scale", "temperature"), shape) for x in parts]
    words = [_arrays(x, ("weight", "bias", "mask")) if _is_layer(x) else None for x in parts]
    plan = plan_of(first.parallel, first.hidden, first.weight)

    def run(tokens: PyTree, words: PyTree, _: None) -> Array:
        axes = jax.tree.leaves(tokens)[0].shape[: len(shape)]
        tokens = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(axes) :]), tokens)
        count = len(jax.tree.leaves(tokens)[0])
        chunks = -(-count // max(_MOST // len(first.weight), _LEAST)) or 1
        size = -(-count // chunks)
        function = _Sum(_Chunk(f, form, kinds), WordBlocks(BlockSize(size, size)))
        found = autodiff.function_call(function, mesh_axes.vary_together((words, tokens)))
        return found.reshape((1,) * len(axes))

    return over_devices(plan, run, tokens, words, None).sum()


def _is_layer(x: object) -> bool:
    return isinstance(x, OutputLayer)


def _check_argument(x: object, shape: tuple[int, ...], first: OutputLayer) -> None:
    if isinstance(x, OutputLayer):
        axes, parallel = x.hidden.shape[:-1], x.parallel
    elif isinstance(x, jax.Array | np.ndarray):
        axes, parallel = x.shape[: len(shape)], first.parallel
    else:
        raise TypeError(f"args: wanted arrays and Categoricals, got {checks.received(x)}")
    if axes != shape:
        raise ValueError(f"args: wanted leading axes {shape} everywhere, got {axes}")
    if parallel != first.parallel:
        raise ValueError(f"args: wanted parallel={first.parallel} everywhere, got {parallel}")


def _check_losses(losses: object, shape: tuple[int, ...]) -> Array:
    if not isinstance(losses, jax.Array) or losses.shape != shape:
        raise ValueError(f"f: wanted losses of shape {shape}, got {checks.received(losses)}")
    return losses


def _is_in_chunks(layers: list[OutputLayer]) -> bool:
    # XLA would send tokens that it has sharded itself to all devices, in each chunk. In 16 bits the gradient of the
    # output matrix would need a copy in float32, to which chunks are added.
    plans = [plan_of(x.parallel, x.hidden, x.weight) for x in layers]
    return (
        not any(x.reproducible for x in layers)
        and all(x.dtype == lse_dtype(x.dtype) for x in map(static_layer, layers))
        and not any(x and x.words for x in plans)
        and (all(plans) or jax.device_count() == 1)
    )


def _arrays(x: Any, names: tuple[str, ...], shape: tuple[int, ...] | None = None) -> Any:
    """The arrays of these attributes, or an argument that is an array itself; None for a number."""
    if not _is_layer(x):
        return jnp.asarray(x)
    found = {name: getattr(x, name) for name in names}
    found = {name: None if isinstance(y, float) else y for name, y in found.items()}
    if shape is None:
        return found
    spread = (
        x if name == "hidden" or x is None else jnp.broadcast_to(x, shape)
        for name, x in found.items()
    )
    return dict(zip(found, spread, strict=True))


class _Kind(NamedTuple):
    """The options of a distribution; static."""

    kind: type[OutputLayer]
    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, x: object) -> "_Kind | None":
        if not isinstance(x, OutputLayer):
            return None
        numbers = {name: getattr(x, name) for name in ("scale", "temperature")}
        values = {name: y for name, y in numbers.items() if isinstance(y, float)}
        values |= {"soft_cap": x.soft_cap, "parallel": None, "reproducible": False}
        return cls(type(x), tuple(values.items()))

    def join(self, tokens: dict[str, Any], words: dict[str, Any]) -> OutputLayer:
        """The distribution of a chunk, whose statistics share its logits."""
        layer = self._with(**tokens | words | dict(self.values))
        hidden, scores = lax.stop_gradient(layer.hidden), dense_logits(layer)
        return self._with(
            **vars(layer) | {"hidden": hidden, "scale": 1.0, "temperature": 1.0, "scores": scores}
        )

    def _with(self, **attributes: Any) -> OutputLayer:
        result = object.__new__(self.kind)
        for name, x in attributes.items():
            object.__setattr__(result, name, x)
        return result


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """The sum of the losses of some tokens, which take the place of words of a block."""

    f: Callable[..., Any]
    form: Any  # the structure of the arguments
    kinds: tuple[_Kind | None, ...]

    def __call__(self, words: list[Any], block: Block) -> tuple[Array, tuple[()]]:
        parts = (
            tokens if kind is None else kind.join(tokens, of_words)
            for kind, tokens, of_words in zip(self.kinds, block.words, words, strict=True)
        )
        losses = _check_losses(self.f(*self.form.unflatten(parts)), block.number.shape)
        if block.is_new is not None:
            losses = jnp.where(block.is_new, losses, 0.0)
        return losses.sum(), ()


@dataclasses.dataclass(frozen=True)
class _ChunkWithGradient:
    """The sum of the losses of a chunk, and its gradients."""

    term: _Chunk
    needed: Any  # the structure of the arrays whose gradients are needed, in which others are None

    def __call__(self, words: PyTree, block: Block) -> tuple[Any, Any]:
        value = self.term(words, block)[0]  # XLA computes it once, here and for the gradient
        rows = words, lax.full_like(value, 1)
        pairs = block._replace(words=(block.words, ()))
        of_words, of_tokens = CotangentTerm(self.term, self.needed)(rows, pairs)
        return (value, of_words), of_tokens


@dataclasses.dataclass(frozen=True)
class _Sum(autodiff.AbstractFunction):
    term: _Chunk
    chunks: WordBlocks

    def apply(self, args: PyTree) -> Array:
        return Sums(self.term, self.chunks).apply(args)[0]

    def jvp(self, primals: PyTree, tangents: PyTree) -> tuple[Array, Array]:
        term = _ChunkWithGradient(self.term, jax.tree.structure(tangents))
        (value, of_words), of_tokens = autodiff.function_call(Sums(term, self.chunks), primals)
        pairs = zip(*map(jax.tree.leaves, ((of_words, of_tokens), tangents)), strict=True)
        changes = [jnp.vdot(slope, change).astype(value.dtype) for slope, change in pairs]
        return value, sum(changes[1:], changes[0])
