"""The list of attention problems that every implementation is judged on, and how they are handed to JAX.

A `Problem` holds what `local_attention` takes, as NumPy float64 arrays and plain options. Sizes are small (compiling
dominates the time of a test) and mostly prime, and T and S differ unless that is the point, so that a swapped axis
cannot pass for the right one.
"""

import zlib
from dataclasses import dataclass, fields, replace

import jax.numpy as jnp
import numpy as np
from jax import Array

from energy_attn.kernels import KernelCall
from energy_attn.kernels.internal import arguments
from tests.support.arrays import array
from tests.support.masks import RULES

ARRAYS = ("query", "key", "value", "source", "bias")


@dataclass(frozen=True, eq=False)
class Problem:
    name: str
    query: np.ndarray  # [B, T, N, H]
    key: np.ndarray  # [B, S, K, H]
    value: np.ndarray  # [B, S, K, V]
    source: np.ndarray | None = None  # [B, T, N, V]
    bias: np.ndarray | None = None  # broadcastable to [B, N, T, S], as mask
    mask: np.ndarray | None = None
    scale: float | None = None
    is_causal: bool = False
    query_seq_lengths: np.ndarray | None = None
    key_value_seq_lengths: np.ndarray | None = None
    local_window_size: int | tuple[int, int] | None = None
    query_positions: np.ndarray | None = None  # [B, T]
    key_positions: np.ndarray | None = None  # [B, S]
    query_segment_ids: np.ndarray | None = None  # [B, T]
    key_segment_ids: np.ndarray | None = None  # [B, S]
    rule: str | None = None  # of `RULES`, in the place of a mask

    def __repr__(self):
        return self.name

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The differentiable arrays that the problem has, by argument name."""
        return {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}

    @property
    def options(self) -> dict:
        """All other arguments of `local_attention` that are not left at their defaults; arrays as JAX arrays."""
        given = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in (*ARRAYS, "name", "rule")
        }
        if self.rule is not None:
            given["mask"] = RULES[self.rule].of(len(self.query))
        return {
            name: array(option) if isinstance(option, np.ndarray) else option
            for name, option in given.items()
            if option is not None and option is not False
        }

    def rng(self, purpose: str) -> np.random.Generator:
        """Random numbers that depend on the names alone, not on which tests run before."""
        return np.random.default_rng(zlib.crc32(f"{self.name}/{purpose}".encode()))


def cast(problem: Problem, dtype) -> tuple[dict[str, Array], Problem]:
    """The arrays rounded to `dtype`, for JAX; and the problem with those same rounded values in float64, for the judge.

    So a comparison sees the errors of arithmetic alone, not those of rounding the inputs.
    """
    arrays = {name: array(x, dtype) for name, x in problem.arrays.items()}
    return arrays, replace(
        problem, **{name: np.asarray(x, np.float64) for name, x in arrays.items()}
    )


def call_of(*arrays, platform: str | None = None, **options) -> KernelCall:
    """The call that kernels get for these arrays and options of `local_attention`."""
    checked = arguments.check_call(*arrays, **options)
    return KernelCall(checked.operands, checked.settings, platform)


def problem_call(problem: Problem, dtype=jnp.float32, platform: str | None = None) -> KernelCall:
    return call_of(**cast(problem, dtype)[0], **problem.options, platform=platform)


def cotangents(problem: Problem, dtype) -> tuple[Array, Array]:
    """Random cotangents of out (in `dtype`) and of lse (float32 or wider); fully masked rows get some as well."""
    rng, (B, T, N, _) = problem.rng("cotangents"), problem.query.shape
    dout = rng.standard_normal((B, T, N, problem.value.shape[-1]))
    dlse = rng.standard_normal((B, T, N))
    return array(dout, dtype), array(dlse, lse_dtype(dtype))


def tangents(problem: Problem) -> dict[str, np.ndarray]:
    """A random direction in all differentiable arrays, of about unit length each."""
    rng = problem.rng("tangents")
    return {
        name: rng.standard_normal(a.shape) / np.sqrt(max(a.size, 1))
        for name, a in problem.arrays.items()
    }


def lse_dtype(dtype) -> np.dtype:
    """float64 for float64, float32 for everything narrower."""
    return np.dtype(np.float64 if jnp.dtype(dtype) == np.float64 else np.float32)


def _make(
    name, B=2, T=5, S=7, N=2, K=None, H=5, V=None, *, source=False, bias=None, **options
) -> Problem:
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    K, V = K or N, V or H

    def normal(*shape):
        return rng.standard_normal(shape)

    query, key, value = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, V)
    extra = {"source": normal(B, T, N, V)} if source else {}
    if bias is not None:
        extra["bias"] = normal(*bias) if isinstance(bias, tuple) else bias
    return Problem(name, query, key, value, **extra, **options)


def _ints(*values):
    return np.asarray(values, np.int32)


def _mask(shape, empty_rows=()):
    """A random mask (two in three visible) in which the given rows see nothing."""
    mask = np.random.default_rng(0).random(shape) < 2 / 3
    mask[:, :, list(empty_rows)] = False
    return mask


def _all_problems():
    B, N, T, S = 2, 2, 5, 7  # the sizes that _make gives when told nothing
    yield _make("plain")
    yield _make("scale", scale=0.7)
    # ζ/scale as extra head dimensions would be NaN
    yield _make("scale_zero_source", scale=0.0, source=True)
    yield _make("scale_negative_source", scale=-0.6, source=True)

    # Shapes.
    yield _make("primes", B=1, T=37, S=41, N=3, is_causal=True)
    yield _make("one_query", T=1)
    yield _make("one_key", S=1, source=True)
    yield _make("one_of_each", B=1, T=1, S=1, N=1, H=1)
    yield _make("no_keys", S=0, source=True)
    yield _make("no_queries", T=0)
    yield _make("grouped", N=6, K=2)
    yield _make("multi_query", N=3, K=1, source=True)
    yield _make("value_wider", V=7, source=True)
    yield _make("value_narrower", N=4, K=2, H=6, V=3)
    yield _make("value_one", V=1)

    # Predicates on positions.
    yield _make("causal", T=7, S=7, is_causal=True)
    yield _make("causal_more_keys", T=3, S=11, is_causal=True)
    yield _make("causal_more_queries", T=11, S=3, is_causal=True)
    yield _make("window", T=11, S=11, local_window_size=2)
    yield _make("window_pair", T=11, S=9, local_window_size=(3, 1))
    yield _make("window_diagonal", T=9, S=5, local_window_size=(0, 0))  # rows 5 to 8 see nothing
    yield _make("window_causal", T=11, S=11, is_causal=True, local_window_size=3, source=True)
    yield _make(
        "window_causal_pair", N=4, K=2, T=11, S=11, is_causal=True, local_window_size=(2, 4)
    )
    ragged = {"query_seq_lengths": _ints(3, 0, 5), "key_value_seq_lengths": _ints(7, 4, 0)}
    yield _make("ragged", B=3, **ragged, source=True)
    yield _make("ragged_keys", B=3, key_value_seq_lengths=_ints(1, 0, 7), is_causal=True)
    yield _make("ragged_queries", B=3, query_seq_lengths=_ints(1, 0, 5))
    decode = {"query_positions": _ints([9], [3]), "is_causal": True}
    yield _make("decode", T=1, S=13, N=4, K=2, **decode)
    yield _make(
        "decode_source", T=1, S=13, N=4, K=1, V=3, source=True, local_window_size=(4, 0), **decode
    )
    yield _make("decode_ragged", T=1, S=13, key_value_seq_lengths=_ints(9, 0), bias=(1, N, 1, 13))
    yield _make(
        "decode_cache", T=1, key_positions=_ints([6, 5, -1, 3, 12, -1, 0], [-1] * 7), **decode
    )
    yield _make(
        "decode_few", T=3, S=13, query_positions=_ints([9, 10, 11], [2, 3, -1]), is_causal=True
    )
    shuffled = {
        "query_positions": _ints([4, -1, 0, 9, 2], [30, 31, 32, 33, 34]),
        "key_positions": _ints([6, -1, 3, 0, 9, 4, -1], [33, 28, 30, 29, -1, 31, 90]),
    }
    yield _make("positions", **shuffled)
    yield _make("positions_causal", **shuffled, is_causal=True, N=4, K=2, source=True)
    # up to the last position: with such a window added, 32 bits overflow
    far = {name: np.where(x < 0, -1, x - 90 + (2**31 - 1)) for name, x in shuffled.items()}
    yield _make("positions_window", **far, local_window_size=(3, 2**30))

    # Documents packed into one row; the last query of the second row has none of its own.
    packed = {
        "query_segment_ids": _ints([0, 0, 1, 1, 1], [3, 1, 1, 0, 7]),
        "key_segment_ids": _ints([0, 0, 0, 1, 1, 2, 2], [1, 3, 3, 0, 0, 1, 1]),
    }
    yield _make("segments", **packed)
    yield _make("segments_causal", **packed, is_causal=True, N=4, K=2, source=True)

    # Masks that compose.
    for name in RULES:
        yield _make(f"rule_{name}", B=2, T=9, S=11, N=2, K=1, rule=name)
    yield _make("rule_positions", **shuffled, rule="nested", source=True)

    # Arrays of the user's own.
    for shape in ((B, N, T, S), (1, N, T, S), (B, 1, T, S), (B, N, 1, S), (B, N, T, 1)):
        yield _make(f"bias_{'x'.join(map(str, shape))}", bias=shape)
    yield _make("bias_rows", bias=(1, 1, T, 1), is_causal=True)
    yield _make("bias_heads", N=4, K=2, bias=(1, 4, 1, 1))
    yield _make("bias_keys", bias=(B, 1, 1, S), source=True)
    yield _make("bias_scalar", bias=(1, 1, 1, 1))
    yield _make("mask", mask=_mask((B, N, T, S), empty_rows=[1, 4]))
    yield _make("mask_heads", mask=_mask((1, N, T, S)), is_causal=True)
    yield _make("mask_keys", mask=_mask((B, 1, 1, S)), N=4, K=2)
    yield _make("mask_nothing", mask=np.zeros((1, 1, 1, 1), bool), bias=(B, N, T, S), source=True)

    # Large and infinite scores.
    yield _make("shift_up", bias=1e4 + np.random.default_rng(1).standard_normal((B, N, T, S)))
    yield _make("shift_down", bias=-1e4 + np.random.default_rng(2).standard_normal((1, 1, T, S)))
    yield _make("bias_infinite", bias=np.where(_mask((B, N, T, S), empty_rows=[2]), 0.3, -np.inf))

    yield everything("everything", B=2, T=11, S=13)
    yield everything("predicates", B=2, T=11, S=13, arrays=False)


def everything(name, B, T, S, arrays=True) -> Problem:
    """All options at once (explicit positions apart, which replace the lengths' and the default ones).

    `arrays`: with a bias and a mask, which hand-written kernels decline.
    """
    own = {"bias": (1, 4, T, S), "mask": _mask((B, 1, T, S), empty_rows=[T // 2])} if arrays else {}
    return _make(
        name,
        *(B, T, S),
        **{"N": 4, "K": 2, "H": 5, "V": 3},
        **own,
        source=True,
        scale=0.4,
        is_causal=True,
        query_seq_lengths=_ints(*(T - 1 - 2 * b for b in range(B))),
        key_value_seq_lengths=_ints(*(S - 3 * b for b in range(B))),
        local_window_size=(2 * T // 3, 1),
        query_segment_ids=np.arange(T, dtype=np.int32)[None] // 6 + np.zeros((B, 1), np.int32),
        key_segment_ids=np.arange(S, dtype=np.int32)[None] // 6 + np.zeros((B, 1), np.int32),
    )


PROBLEMS = {problem.name: problem for problem in _all_problems()}

# More than one block of queries and of keys: at the blocks' real size, and at a toy one that a test sets.
LARGE = {
    problem.name: problem
    for problem in (
        _make("large", B=1, T=523, S=1031, N=4, K=1, H=3, is_causal=True),
        _make(
            "large_window",
            B=1,
            T=1031,
            S=1031,
            N=2,
            K=1,
            H=3,
            is_causal=True,
            local_window_size=(100, 0),
            source=True,
        ),
    )
}
# Heads of real models, few and many queries of a block of keys that is never full.
HEADS = {
    problem.name: problem
    for problem in (
        _make(
            "heads_16_2",
            B=1,
            T=3,
            S=37,
            N=16,
            K=2,
            H=64,
            query_positions=_ints([34, 35, 36]),
            is_causal=True,
        ),
        _make("heads_8_8", B=2, T=1, S=29, N=8, H=16, key_value_seq_lengths=_ints(21, 0)),
        _make("heads_8_1", B=1, T=64, S=67, N=8, K=1, H=16, is_causal=True),
    )
}
BLOCKS = {
    problem.name: problem
    for problem in (
        _make("blocks", T=23, S=29, N=2, K=1, source=True, bias=(2, 1, 23, 29)),
        # Query positions from 1 on, so that first and last positions of two blocks meet and just see each other.
        _make("blocks_causal", T=32, S=32, query_positions=_ints(range(1, 33)), is_causal=True),
        _make(
            "blocks_edges",
            T=32,
            S=32,
            query_positions=_ints(range(1, 33)),
            local_window_size=(2, 0),
        ),
        # The first query of a block of 8 just sees the last key of another.
        _make("blocks_window", T=29, S=29, is_causal=True, local_window_size=(9, 0)),
        _make(
            "blocks_segments",
            *(1, 32, 32),
            query_segment_ids=_ints(np.arange(32) // 5),
            key_segment_ids=_ints(np.arange(32) // 5),
        ),
        _make("blocks_rule", B=2, T=32, S=32, rule="nested", N=4, K=2),
        _make("blocks_rows_bias", T=19, S=31, bias=(1, 2, 19, 1), local_window_size=4),
        everything("blocks_everything", B=2, T=31, S=37),
        everything("blocks_predicates", B=2, T=31, S=37, arrays=False),
    )
}
