"""Checks of single arguments. An error names the argument, the wanted and the given value."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

Shaped = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct

FLOATING = tuple(map(jnp.dtype, ("float16", "bfloat16", "float32", "float64")))
_FLOATING = "float16, bfloat16, float32 or float64"


def received(x: object) -> str:
    """An argument as errors show it: `float32[2,3]` for arrays, else its type and value; long texts are cut."""
    arrays = (jax.Array, np.ndarray)
    if isinstance(x, arrays):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    if isinstance(x, (tuple, list)) and any(isinstance(item, arrays) for item in x):
        text = f"of {', '.join(map(received, x))}"
    else:
        text = " ".join(repr(x).split())
    return f"{type(x).__name__} {text if len(text) < 60 else text[:57] + '...'}"


def check_array(name: str, x: object) -> Any:
    """Returns `x` if it is a JAX or NumPy array; converts nothing."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name}: wanted a JAX or NumPy array, got {received(x)}")
    return x


def check_floating(name: str, x: object) -> Any:
    array = check_array(name, x)
    if array.dtype not in FLOATING:
        raise TypeError(f"{name}: wanted a {_FLOATING} array, got {received(x)}")
    return array


def check_shape(name: str, x: Shaped, shape: tuple[int | str, ...]) -> None:
    """Checks `x.shape` against `shape`, in which a string stands for any size."""
    fits = len(x.shape) == len(shape)
    for want, have in zip(shape, x.shape, strict=False):
        fits = fits and (isinstance(want, str) or want == have)
    if not fits:
        raise ValueError(f"{name}: wanted shape ({', '.join(map(str, shape))}), got {received(x)}")


def check_broadcastable(
    name: str, x: Shaped, shape: tuple[int, ...], *, leading: bool = True
) -> None:
    """Checks that each axis of `x` has the size in `shape`, or 1. `leading`: whether leading axes are required."""
    sizes = x.shape if leading else (1,) * (len(shape) - len(x.shape)) + x.shape
    if not broadcasts(sizes, shape):
        raise ValueError(
            f"{name}: wanted a shape broadcastable to ({', '.join(map(str, shape))})"
            f"{' with each axis given' if leading else ''}, got {received(x)}"
        )


def broadcasts(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return len(sizes) == len(shape) and all(
        have in (1, want) for want, have in zip(shape, sizes, strict=True)
    )


def check_boolean(name: str, x: object) -> Any:
    array = check_array(name, x)
    if array.dtype != jnp.bool_:
        raise TypeError(f"{name}: wanted a boolean array, got {received(x)}")
    return array


def as_visible(name: str, x: object) -> Any:
    """Returns a mask of booleans, or of numbers where zero hides a key, as booleans; known negative numbers raise."""
    array = check_array(name, x)
    if array.dtype == jnp.bool_:
        return array
    if not jnp.issubdtype(array.dtype, jnp.number) or jnp.iscomplexobj(array):
        raise TypeError(f"{name}: wanted an array of booleans or real numbers, got {received(x)}")
    if is_concrete(x):
        with jax.ensure_compile_time_eval():
            additive = not (array >= 0).all()
        if additive:
            raise ValueError(
                f"{name}: wanted booleans, or numbers where zero hides a key, got {received(x)} with negative "
                f"numbers, which are added to scores; write {name}=({name} == 0)"
            )
    return array != 0


def check_integral(name: str, x: object) -> Any:
    array = check_array(name, x)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: wanted an integer array, got {received(x)}")
    return array


def is_concrete(x: object) -> bool:
    """Whether this process can read an array's values: it is not traced, and is fully addressable."""
    if isinstance(x, jax.core.Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def check_int32(name: str, x: object) -> Any:
    """Returns `x` if it is an array of integers whose concrete values fit in int32."""
    array = check_integral(name, x)
    if array.size and not np.can_cast(array.dtype, np.int32) and not isinstance(x, jax.core.Tracer):
        with jax.ensure_compile_time_eval():  # a known array may be used in a program being traced
            least, most = int(array.min()), int(array.max())
        if not -(2**31) <= least <= most < 2**31:
            raise ValueError(f"{name}: wanted numbers of 32 bits, got {least} to {most}")
    return array


def as_int32(x: jax.Array | np.ndarray) -> Any:
    """Integers as int32, clipped to its range; a NumPy array stays one.

    A length beyond all indices, which a compiled program cannot refuse, so remains beyond them.
    """
    if not np.can_cast(x.dtype, np.int32):
        have, wanted = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
        x = x.clip(max(have.min, wanted.min), wanted.max)
    return x.astype(np.int32)


def as_ids(x: jax.Array | np.ndarray) -> Any:
    """Checked ids, which are compared for equality alone, as int32.

    Traced ids of a wider dtype keep 64 bits where JAX enables them, as two of them might be equal in 32 bits.
    """
    needs_int64 = isinstance(x, jax.core.Tracer) and not np.can_cast(x.dtype, np.int32)
    return x.astype(jax.dtypes.canonicalize_dtype(np.int64) if needs_int64 else np.int32)


def check_floating_dtype(name: str, x: object) -> jnp.dtype:
    try:
        # other types are refused: NumPy reads None as float64, and an array as its dtype
        dtype = jnp.dtype(x) if isinstance(x, (str, type, np.dtype)) else None
    except (TypeError, ValueError, SyntaxError):  # NumPy parses names that begin with a number
        dtype = None
    if dtype is None or dtype not in FLOATING:
        raise TypeError(f"{name}: wanted {_FLOATING}, got {received(x)}")
    return dtype


def check_key(name: str, x: object) -> jax.Array:
    """Returns `x` if it is one random key, of `jax.random.key` or in the older uint32 form."""
    if isinstance(x, jax.Array):
        new = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if x.ndim == 0 if new else x.ndim == 1 and x.dtype == jnp.uint32:
            return x
    raise TypeError(f"{name}: wanted a jax.random.key, got {received(x)}")


def check_finite_number(name: str, x: object) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: wanted a real number, got {received(x)}")
    try:
        number = float(x)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: wanted a finite number, got {received(x)}")
    return number


def check_positive(name: str, x: object, most: int | None = None) -> Any:
    """Returns a number or a floating scalar array above 0 and at most `most`; traced ones are not read."""
    number = x
    if isinstance(x, (jax.Array, np.ndarray)):
        check_floating(name, x)
        if x.ndim:
            raise ValueError(f"{name}: wanted a number or a floating scalar, got {received(x)}")
        if isinstance(x, jax.core.Tracer):
            return x
        number = float(x)
    number = check_finite_number(name, number)
    if number <= 0 or (most is not None and number > most):
        bounds = "above 0" if most is None else f"above 0 and at most {most}"
        raise ValueError(f"{name}: wanted a number {bounds}, got {number}")
    return x if isinstance(x, jax.Array) else number


def check_integer(name: str, x: object, least: int | None = None, *, is_wide: bool = False) -> int:
    """Returns an integer, no boolean, of at least `least`, and of 32 bits unless it `is_wide`."""
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise TypeError(f"{name}: wanted an integer, got {received(x)}")
    if least is not None and x < least:
        raise ValueError(f"{name}: wanted at least {least}, got {x}")
    if not (is_wide or -(2**31) <= x < 2**31):
        raise ValueError(f"{name}: wanted an integer of 32 bits, got {received(x)}")
    return int(x)


def check_axis(name: str, x: object, rank: int, of: str) -> int:
    """Returns the axis `x` of an array of `rank` axes, named `of`, counted from the front."""
    axis = check_integer(name, x)
    if not -rank <= axis < rank:
        raise ValueError(f"{name}: wanted one of the {rank} axes of {of}, got {axis}")
    return axis % rank


def check_choice(name: str, x: object, choices: Sequence[str | None]) -> None:
    if not (x is None or isinstance(x, str)) or x not in choices:
        raise ValueError(
            f"{name}: wanted one of {', '.join(map(repr, choices))}, got {received(x)}"
        )


def check_names(name: str, x: object, what: str) -> tuple[str, ...]:
    """Returns one name or a sequence of different names as a tuple; `what` is the plural noun in errors."""
    names = (x,) if isinstance(x, str) else x
    if not isinstance(names, Sequence) or not names or not all(isinstance(n, str) for n in names):
        raise TypeError(f"{name}: wanted names of {what}, got {received(x)}")
    if len(set(names)) != len(names):
        raise ValueError(f"{name}: wanted different names, got {tuple(names)}")
    return tuple(names)


def check_function(name: str, x: object, *arguments: str, static: bool = True) -> None:
    """Checks that `x` can be called with these arguments, and hashed if it is `static`."""
    wanted = f"a function of ({', '.join(arguments)})"
    if not callable(x):
        raise TypeError(f"{name}: wanted {wanted}, got {received(x)}")
    try:
        takes = inspect.signature(x)
    except (TypeError, ValueError):  # a function that is not written in Python
        takes = None
    try:
        if takes is not None:
            takes.bind(*arguments)
    except TypeError:
        raise TypeError(f"{name}: wanted {wanted}, got one of {takes}") from None
    try:
        hash(x if static else None)
    except TypeError:
        raise ValueError(
            f"{name}: wanted one that can be hashed, with its arrays given as parameters, "
            f"got {received(x)}"
        ) from None


def check_nesting(name: str, x: object, kind: type, hint: str) -> None:
    """Raises `ValueError` for a module that nests more than 100 modules of its kind."""
    level = [x]
    for _ in range(101):
        fields = [field for module in level for field in vars(module).values()]
        fields += [item for field in fields if isinstance(field, tuple) for item in field]
        level = list({id(field): field for field in fields if isinstance(field, kind)}.values())
    if level:
        raise ValueError(f"{name}: wanted at most 100 inside each other, got more; {hint}")


def check_text(name: str, x: object) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{name}: wanted a text, got {received(x)}")
    return x


def check_flag(name: str, x: object) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name}: wanted True or False, got {received(x)}")
    return bool(x)


def check_taylor(arrays: object) -> None:
    """Raises `NotImplementedError` under `jax.experimental.jet`, which only JAX's own derivatives pass.

    `jet` ignores the derivatives that kernels define, and has no rule for loops. Its tracers are visible only in a
    call outside of `jax.jit`.
    """
    # no rules for `scan` and `while`: https://github.com/jax-ml/jax/issues/27699
    for x in jax.tree.leaves(arrays):
        if type(x).__module__ == "jax.experimental.jet":  # by name, so that jet is not imported
            raise NotImplementedError(
                "implementation: wanted 'reference' on one device, or nested jax.jvp, which all "
                "implementations have; got another under jax.experimental.jet"
            )
