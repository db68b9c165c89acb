"""What each implementation takes, and how its states and gradients are judged."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
import pytest

from energy_attn.kernels import AbstractKernel, AttentionState, local_attention
from energy_attn.kernels.dispatch import _registry
from energy_attn.kernels.internal import GPUTiles, PallasGPU, platform_here
from energy_attn.kernels.pallas.gpu._plan import KINDS
from energy_attn.kernels.pallas.tpu._kernel import LayoutSizes, PallasTPU
from energy_attn.kernels.xla._blockwise import Blockwise
from energy_attn.kernels.xla._decode import DecodeCPU
from energy_attn.kernels.xla._grid import BlockSizes
from energy_attn.kernels.xla._loops import Products
from tests.support.compare import same
from tests.support.masks import RULES
from tests.support.naive import assert_all_close, select
from tests.support.problems import BLOCKS, HEADS, LARGE, PROBLEMS, Problem, cast, cotangents
from tests.support.reference import blind_rows_and_hidden_keys

EVERY = PROBLEMS | BLOCKS | LARGE | HEADS
ALL = frozenset(EVERY)
ARRAYS = frozenset(name for name, x in EVERY.items() if x.bias is not None or x.mask is not None)
EMPTY = frozenset({"no_keys", "no_queries"})
# More than 64 rows times heads.
MANY_ROWS = frozenset(
    {"primes", "blocks_rule", "blocks_everything", "blocks_predicates", "heads_8_1", *LARGE}
)
# At most 1,024 rows, and no empty axis.
FEW_ROWS = (
    frozenset(name for name, x in EVERY.items() if x.query.shape[1] * x.query.shape[2] <= 1024)
    - EMPTY
)


class Traits(NamedTuple):
    """What an implementation is held to.

    `accepts`: the problems that it takes; it declines all others. `dtypes`: those that it takes, the most exact first.
    `judged`: the problems of `PROBLEMS` that its state and gradients are computed for, as compiling dominates.
    """

    accepts: frozenset[str]
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16", "float16")
    judged: frozenset[str] = ALL


# Hand-written kernels are interpreted here, and compile slowly: fewer problems, which go through every path.
PREDICATES = ALL - ARRAYS - EMPTY
GPU = Traits(
    PREDICATES,
    ("float32", "bfloat16", "float16"),
    PREDICATES
    & {
        *("plain", "one_of_each", "multi_query", "value_wider", "scale_negative_source"),
        *(
            "causal_more_queries",
            "window_diagonal",
            "window_causal_pair",
            "ragged",
            "decode_source",
        ),
        *("decode_cache", "positions_causal", "positions_window", "segments_causal", "predicates"),
        *(f"rule_{name}" for name in RULES),
    },
)
TPU = GPU._replace(dtypes=("float32", "bfloat16"))
# Vendors' kernels take none of these small problems: see `test_vendors.py`.
VENDOR = Traits(frozenset(), ("bfloat16",), frozenset())
# An implementation that is new to the registry states here what it takes.
TRAITS = {
    "cudnn": VENDOR,
    # 16 bits, and widths that 16 divides; see `test_mosaic_gpu.py`
    "mosaic_gpu": Traits(frozenset(HEADS), ("bfloat16", "float16"), frozenset(HEADS)),
    "pallas_gpu": GPU,
    "flash": VENDOR,
    "fa4": VENDOR,
    "splash": VENDOR,
    "pallas_tpu": TPU,
    "reference": Traits(ALL),
    "blockwise": Traits(ALL),
    # several blocks: see `test_decode_cpu.py`
    "decode_cpu": Traits(FEW_ROWS),
    "decode": Traits(ALL - MANY_ROWS),
}
HERE = platform_here()
# The others have no interpreter: they are compiled elsewhere in the suite, and run where their platform is.
RUNNABLE = tuple(
    name
    for name, kernel in _registry._REGISTRY.items()
    if TRAITS[name] != VENDOR
    and (not kernel.platforms or HERE in (*kernel.interpreted, *kernel.platforms))
)
# Kernels that bring a forward pass alone, differentiated by the blockwise backward: all gradients of
# that one are checked, and of these a few, to see that they save the state it wants.
FORWARD_ONLY = frozenset({"decode", "decode_cpu"})
SECOND = ("everything", "positions_causal", "mask_nothing", "decode_source")


def kernel_of(name: str) -> AbstractKernel:
    """The kernel of the registry under a name."""
    return _registry._REGISTRY[name]


def register(monkeypatch: pytest.MonkeyPatch, *kernels: AbstractKernel) -> None:
    """Replaces the registry until the end of a test."""
    monkeypatch.setattr(_registry, "_REGISTRY", {kernel.name: kernel for kernel in kernels})


def takes(implementation: str, name: str, dtype: str | None = None) -> bool:
    """Whether `TRAITS` states that it takes a problem in a dtype; None: its most exact one."""
    traits = TRAITS[implementation]
    return name in traits.accepts and (dtype is None or dtype in traits.dtypes)


def exactest(implementation: str | AbstractKernel) -> np.dtype:
    name = implementation.name if isinstance(implementation, AbstractKernel) else implementation
    return np.dtype(TRAITS[name].dtypes[0])


def attend(
    arrays: dict, problem: Problem, implementation: str | AbstractKernel | None
) -> AttentionState:
    return local_attention(**arrays, **problem.options, implementation=implementation)


def arrays_of(implementation: str | AbstractKernel, problem: Problem, dtype=None):
    """The arrays of a problem, in the most exact dtype of an implementation unless told otherwise."""
    return cast(problem, exactest(implementation) if dtype is None else dtype)[0]


def state_and_gradients(implementation: str | AbstractKernel | None, problem: Problem):
    """One program for the state and the gradients for given cotangents, so that each problem compiles once."""

    @jax.jit
    def run(arrays, dout, dlse):
        state, back = jax.vjp(lambda arrays: attend(arrays, problem, implementation), arrays)
        return state._asdict() | back(AttentionState(dout, dlse))[0]

    return run


def check(
    implementation: str | AbstractKernel,
    problem: Problem,
    dtype,
    cotangents_of: Sequence[str] = ("both", "out", "lse"),
) -> None:
    """State and all gradients, for cotangents of out alone, of lse alone and of both; each call gives the same bits."""
    arrays = arrays_of(implementation, problem, dtype)
    if implementation in FORWARD_ONLY and problem.name not in SECOND:
        forward = functools.partial(attend, problem=problem, implementation=implementation)
        state = jax.jit(forward)(arrays)
        assert_all_close(state._asdict(), problem, dtype, "both", label=implementation)
        return
    run = state_and_gradients(implementation, problem)
    blind, hidden = blind_rows_and_hidden_keys(problem)
    for which in cotangents_of:
        given = arrays, *select(which, *cotangents(problem, dtype))
        found, again = ({name: np.asarray(x) for name, x in run(*given).items()} for _ in range(2))
        same(found, again, f"{implementation}, {problem}: the second time")
        assert_all_close(found, problem, dtype, which, label=implementation)
        for name in {"out", "query", "source"} & set(found):
            assert not found[name][blind].any(), f"{name} is not zero in fully masked rows"
        for name in ("key", "value"):
            assert not found[name][hidden].any(), f"gradient of {name} is not zero at hidden keys"


# Blocks of 8 or 16 queries and keys: many of them, and ragged last ones, in a problem that is quick to compile.
SMALL_BLOCKS = BlockSizes(rows=8, keys=8, keys_of_few_rows=8)
SMALL_TILES = tuple(GPUTiles(kind, 16, 16, programs=16, least_steps=1) for kind in KINDS)
SMALL_LAYOUT = LayoutSizes(
    rows=16, keys=8, keys_of_few_rows=8, keys_backward=8, lanes=1, sublanes=1
)
SMALL = {
    kernel.name: kernel
    for kernel in (
        Blockwise(SMALL_BLOCKS),
        PallasGPU(SMALL_TILES),  # some keys split, some not
        PallasTPU(SMALL_LAYOUT),
    )
}
# Three keys added together, in blocks that do not divide the keys; for some rows loops of vectors, for others products.
SMALL_PIECES = DecodeCPU(6, Products(lanes=2, keys=3, passes=2))


def of_any_rows(implementation: str) -> str | AbstractKernel:
    """The implementation; in the place of `decode_cpu`, one of small blocks."""
    return SMALL_PIECES if implementation == "decode_cpu" else implementation
