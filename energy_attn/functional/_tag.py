"""The primitive that marks energies in a program while the program is recorded."""

import abc
import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array


class AbstractRecorder(abc.ABC):
    """The figures that a recording computes for each energy; hashable, as programs are cached by it."""

    @abc.abstractmethod
    def observe(self, call: Any, operands: Any, source: Any) -> Any:
        """A tree of arrays, from a prepared call and its checked source; None is zero."""


# The recorders at work, the outermost first. JAX's caches tell programs with tags from those without.
recorders = jax.make_user_context(())


# The place in a model of the calls that are traced; part of the caches' keys, and so set only during a recording.
_place = jax.make_user_context("")


def placed(place: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which recorded calls are named by their place, as `layers[0].attention`."""
    return _place(place) if recorders.value else contextlib.nullcontext()


def tagged(query: Array, name: str, call: Any, operands: Any, source: Any) -> Array:
    """The query of a prepared call, with the figures of the active recorders as side inputs of a primitive."""
    # the call depends on the query, so that no transformation of JAX drops the figures before the call
    active, place = recorders.value, _place.value
    if place and not name.startswith(place):  # unless it is the path of an energy in the model
        name = f"{place}.{name}"
    for level, recorder in enumerate(active):
        with recorders(()):  # figures are not recorded themselves
            observed = recorder.observe(call, operands, source)
        values, tree = jax.tree.flatten(observed)
        query = tag_p.bind(
            query, *map(jnp.asarray, values), name=name, level=level, tree=tree, axes=()
        )
    return query


tag_p = Primitive("record")


@tag_p.def_impl
@tag_p.def_abstract_eval
def _query(query: Any, *values: Any, **_: Any) -> Any:
    del values
    return query


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **static: Any) -> tuple[Any, Any]:
    # Values leave the program where they are tagged, and are differentiated there.
    return tag_p.bind(*primals, **static), tangents[0]


def _batch(
    args: Sequence[Array], mapped: Sequence[int | None], *, axes: tuple[str, ...], **static: Any
) -> tuple[Array, int | None]:
    size = next(x.shape[axis] for x, axis in zip(args, mapped, strict=True) if axis is not None)
    values = (
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args[1:], mapped[1:], strict=True)
    )
    return tag_p.bind(args[0], *values, axes=("vmap", *axes), **static), mapped[0]


mlir.register_lowering(tag_p, mlir.lower_fun(_query, multiple_results=False))
ad.primitive_jvps[tag_p] = _jvp
batching.primitive_batchers[tag_p] = _batch
