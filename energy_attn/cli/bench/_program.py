"""What programs cost before they run: temporary memory, and the time to compile them."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

import energy_attn

from ._cases import JAX_NN, OURS, Case, Sizes, program, shapes

_MEMORY = Case("memory", Sizes(1, 16384, 16384, 8, 8, 64), "float32", backward=True)
_COMPILED = Case("compilation", Sizes(1, 2048, 2048, 8, 8, 64), "float32", backward=True)
_LAYERS = 1, 32  # attentions in a row, in one program
_SIDES: dict[str, Callable[..., Array]] = {
    OURS: energy_attn.attention,
    JAX_NN: jax.nn.dot_product_attention,
}


def memory(shrink: int) -> dict[str, Any]:
    """The bytes that forward and backward hold beside arguments and results."""
    case = _MEMORY.shrunk(shrink)

    def temporary(attend: Callable[..., Array]) -> int:
        analysis = program(case, attend).lower(*_abstract(case)).compile().memory_analysis()
        return int(analysis.temp_size_in_bytes)

    return {
        "name": "temporary memory, forward + backward",
        "dtype": case.dtype,
        "shape": case.shape._asdict(),
        "bytes": {name: temporary(attend) for name, attend in _SIDES.items()},
    }


def compilation(shrink: int, repeats: int) -> list[dict[str, Any]]:
    """The seconds until the program of a gradient is compiled, in turn, with JAX's caches in memory empty."""
    case = _COMPILED.shrunk(shrink)

    def seconds(attend: Callable[..., Array], layers: int, causal: bool) -> float:
        def attend_to_all(q: Array, k: Array, v: Array) -> Array:
            for _ in range(layers):
                q = attend(q, k, v, is_causal=causal)
            return q

        jax.clear_caches()
        start = time.perf_counter()
        program(case, attend_to_all).lower(*_abstract(case)).compile()
        return time.perf_counter() - start

    def medians(layers: int, causal: bool) -> dict[str, float]:
        runs: dict[str, list[float]] = {name: [] for name in _SIDES}
        for _ in range(repeats):
            for name, attend in _SIDES.items():
                runs[name].append(seconds(attend, layers, causal))
        return {name: round(statistics.median(x), 3) for name, x in runs.items()}

    return [
        {
            "name": "compilation, forward + backward",
            **case._replace(causal=causal).about(),
            "layers": layers,
            "median_s": medians(layers, causal),
        }
        for layers in _LAYERS
        for causal in (False, True)
    ]


def _abstract(case: Case) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(case.dtype)) for shape in shapes(case)]
