"""Integers of 64 bits in compiled programs, where no value can be refused: none is taken for another one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.kernels import implementations, local_attention
from energy_attn.kernels.internal import check_call_of
from tests.kernels.derivatives import check_dense
from tests.support.compare import close
from tests.support.problems import _make, call_of, cast
from tests.support.reference import dense
from tests.support.selection import few_rows
from tests.support.traits import kernel_of

FAR = 2**32  # 32 bits do not tell it from 0
# documents of which 32 bits mix up all but two
IDS = np.array([[1, FAR + 1, 1, 2, FAR + 2, 2, 1, FAR + 1], [FAR, FAR, 0, 0, -FAR, 2, 2, FAR + 2]])
DOCUMENTS = _make("documents", T=8, S=8, query_segment_ids=IDS, key_segment_ids=IDS)
CAUSAL = dataclasses.replace(DOCUMENTS, is_causal=True)
OTHERS = _make("others", T=8, S=8, mask=(IDS[:, :, None] != IDS[:, None])[:, None])


def same(ids):
    return {"query_segment_ids": ids, "key_segment_ids": ids}


@pytest.mark.parametrize(
    ("problem", "said"),
    few_rows(
        [
            (DOCUMENTS, same),
            (CAUSAL, lambda ids: {"mask": masks.Causal() & masks.Segments(ids)}),
            (OTHERS, lambda ids: {"mask": ~masks.Segments(ids, ids)}),
            (CAUSAL, lambda ids: {"is_causal": True, "implementation": "blockwise", **same(ids)}),
            (DOCUMENTS, lambda ids: {"implementation": "reference", **same(ids)}),
            (DOCUMENTS, lambda ids: same(ids.astype("uint64"))),
        ],
        3,
    ),
)
def test_ids_are_compared_exactly(problem, said):
    """Documents 1 and 2^32 + 1, which in 32 bits see each other, in values and gradients."""

    def attend(arrays, ids):
        return local_attention(**arrays, **said(ids))

    check_dense(attend, problem, others=(IDS,), parts=("state", "gradients"))


@pytest.mark.parametrize(
    "method", ["tree", *(pytest.param(x, marks=pytest.mark.full) for x in ("ring", "gather"))]
)
def test_ids_on_a_mesh(method):
    """Ids that a device compares with those of another."""
    arrays, exact = cast(DOCUMENTS, jnp.float64)
    with jax.set_mesh(make_mesh((8,), ("device",))):
        parallel = SequenceParallel("device", method)
        run = jax.jit(lambda arrays, ids: ea.attention(**arrays, **same(ids), parallel=parallel))
        close(run(arrays, IDS), dense(exact)[0], method)


def test_kernels_that_compare_32_bits_decline():
    """A kernel for one platform that would cut ids off, or fail far from the user."""
    x = jax.ShapeDtypeStruct((2, 8, 2, 64), jnp.float32)

    def asked(x, ids):
        call = call_of(x, x, x, **same(ids))
        for kernel in map(kernel_of, implementations()):
            if kernel.platforms:
                with pytest.raises(NotImplementedError, match="query_segment_ids: wanted int32"):
                    check_call_of(kernel, call)

    jax.eval_shape(asked, x, jax.ShapeDtypeStruct((2, 8), jnp.int64))


# More than there are, whatever 32 bits make of them.
MANY = np.array([2 + FAR, 3])
LENGTHS = {
    "option": lambda n: {"key_value_seq_lengths": n},
    "rule": lambda n: {"mask": masks.Lengths(n)},
    "prefix": lambda n: {"mask": masks.Prefix(n)},
    "unsigned": lambda n: {"key_value_seq_lengths": n.astype("uint64")},
}


@pytest.mark.parametrize("said", LENGTHS.values(), ids=LENGTHS)
def test_a_length_is_not_cut_off(said):
    """A length of 2^32 + 2, which in 32 bits is 2."""
    short = _make("short", T=3, S=5, key_value_seq_lengths=np.array([5, 3]))

    def attend(arrays, lengths):
        return local_attention(**arrays, **said(lengths))

    check_dense(attend, short, others=(MANY,), parts=("state",))


def test_positions_keep_their_order():
    """A position of 2^32 + 1 that comes before 3, or one of -2^32 that is present."""
    positions = np.array([[3, 1, FAR + 1, -FAR, 2]])
    known = np.minimum(positions, 2**31 - 1)
    problem = _make("order", B=1, T=5, S=5, is_causal=True)
    problem = dataclasses.replace(problem, query_positions=known, key_positions=known)

    def attend(arrays, at):
        return local_attention(**arrays, is_causal=True, query_positions=at, key_positions=at)

    check_dense(attend, problem, others=(positions,), parts=("state",))
