"""One operation, many implementations: names, what each declines, and the choice."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jaxtyping import Array

from . import _blockwise, _decode, _reference
from ._arguments import Operands, Settings
from ._errors import received
from ._flash import flash
from ._state import AttentionState

Implementation = Callable[[Operands, Settings], AttentionState]


def _blockwise_flash(operands: Operands, settings: Settings) -> AttentionState:
    return flash(_blockwise.forward, settings, operands)


def _decode_flash(operands: Operands, settings: Settings) -> AttentionState:
    return flash(_decode.forward, settings, operands)


# In order of preference. An implementation raises NotImplementedError for calls that it declines,
# saying why; the next one is tried.
_REGISTRY: dict[str, Implementation] = {
    "decode": _decode_flash,
    "blockwise": _blockwise_flash,
    "reference": _reference.forward,
}


def implementations() -> tuple[str, ...]:
    """The names that `implementation=` accepts, in the order in which they are tried.

    - `"decode"`: XLA, few query rows; one matrix product for all heads. Backward as blockwise.
    - `"blockwise"`: XLA, any call, any platform, memory O(T·block); reverse mode of any order.
    - `"reference"`: plain JAX with the whole score matrix; every derivative, both modes.

    Raises nothing. Source: the online softmax of Milakov and Gimelshein (arXiv 1805.02867) for
    all but the reference.

    Examples:
        >>> from energy_attn.kernels import implementations
        >>> "blockwise" in implementations()
        True
    """
    return tuple(_REGISTRY)


class Choice(NamedTuple):
    """Which implementation took a call, and why the ones before it declined."""

    name: str
    declined: tuple[tuple[str, str], ...]


def candidates(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """The implementations to try for the user's `implementation=`.

    Raises `ValueError` for an unknown name and `TypeError` for anything but names.
    """
    if implementation is None:
        return implementations()
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"implementation: wanted a name, names or None, got {received(implementation)}"
        )
    for name in names:
        if name not in _REGISTRY:
            raise ValueError(
                f"implementation: wanted one of {', '.join(map(repr, _REGISTRY))}, got {name!r}"
            )
    return tuple(names)


def attend(names: Sequence[str], settings: Settings, operands: Operands) -> AttentionState:
    """Runs the first of the implementations `names` that takes the call, compiled.

    Raises its `NotImplementedError` if the only one declines, and an `ExceptionGroup` of all
    reasons if several do.
    """
    return _attend(tuple(names), settings, Operands(*vary_together(operands)))


# Compiled here, so that a call outside of jit is traced and compiled once for its shapes.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(names: tuple[str, ...], settings: Settings, operands: Operands) -> AttentionState:
    return _first(names, settings, operands)[0]


def explain(names: Sequence[str], settings: Settings, operands: Operands) -> Choice:
    """Which of `names` takes a call, by shapes alone: `operands` may be `jax.ShapeDtypeStruct`s.

    Raises what `attend` raises.
    """
    found: list[Choice] = []

    def trace(operands: Operands) -> AttentionState:
        state, choice = _first(names, settings, operands)
        found.append(choice)
        return state

    jax.eval_shape(trace, operands)
    return found[0]


def _first(
    names: Sequence[str], settings: Settings, operands: Operands
) -> tuple[AttentionState, Choice]:
    reasons: list[NotImplementedError] = []
    for i, name in enumerate(names):
        try:
            state = _REGISTRY[name](operands, settings)
        except NotImplementedError as reason:
            reasons.append(reason)
        else:
            declined = tuple(zip(names[:i], map(str, reasons), strict=True))
            return state, Choice(name, declined)
    if len(reasons) == 1:
        raise reasons[0]
    raise ExceptionGroup(f"no implementation of {', '.join(names)} takes this call", reasons)


def vary_together(arrays: Sequence[Array | None], axes: Sequence[str] = ()) -> list[Any]:
    """Arrays that all may differ along `axes`, and along those that any of them differs along.

    None stays None. Raises nothing.
    """
    # Inside shard_map, arrays that are equal on all devices (a replicated query) meet arrays that
    # are not (a shard of the keys). Kernels then compute values that differ between devices from
    # all of them; said once here, the derivative of a replicated operand is summed over the
    # devices by JAX itself.
    union = frozenset(axes).union(*(varying_axes(x) for x in arrays if x is not None))

    def vary(x: Array | None) -> Any:
        missing = union - varying_axes(x) if x is not None else None
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return [vary(x) for x in arrays]


def varying_axes(x: Any) -> frozenset[str]:
    """The axes of a surrounding `jax.shard_map` along which an array may differ. Raises nothing."""
    kind = jax.typeof(x)
    # the attribute's name before jax 0.10
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
