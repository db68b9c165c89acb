"""The layouts in which the TPU kernels take keys, which depend on sizes that no quick test has; and blocks by chip.

`test_local_attention.py` checks the layout of its small problems, and blocks with heads folded into the keys; this file
checks the others, by sizes that force them.
"""

import jax
import jax.numpy as jnp
import pytest

from energy_attn.kernels.pallas.tpu._grid import TPUGrid
from energy_attn.kernels.pallas.tpu._kernel import chip_of, make_layout, sizes_on
from tests.support.problems import BLOCKS, HEADS, call_of, problem_call
from tests.support.selection import few_rows
from tests.support.traits import SMALL_LAYOUT, PallasTPU, check

FORMS = {
    "heads in front": SMALL_LAYOUT._replace(few_rows=0),
    "keys last": SMALL_LAYOUT._replace(lanes=8, sublanes=8),
    "keys split": SMALL_LAYOUT._replace(rows=512),
}
CASES = [
    ("heads in front", BLOCKS["blocks_predicates"]),
    ("heads in front", HEADS["heads_16_2"]),
    ("keys last", BLOCKS["blocks_predicates"]),
    ("keys last", BLOCKS["blocks_causal"]),
    ("keys split", HEADS["heads_8_8"]),
]


@pytest.mark.parametrize(("form", "problem"), few_rows(CASES), ids=str)
def test_forms(form, problem):
    """A head, a block or a transposed axis mistaken for another, forward or backward; the odd block of a split lost."""
    sizes = FORMS[form]
    call = problem_call(problem)
    for kind in ("forward", "backward", "tangent"):
        at = make_layout(call.operands, call.settings, kind, sizes)
        assert at.key_blocks > 1
        assert (form == "keys last") == (at.tall_key or at.tall_value)
        if form == "heads in front":
            assert at.heads == problem.key.shape[2]
        if form == "keys split":
            assert at.row_blocks == 1 and at.key_blocks % 2 == 1
            assert kind != "tangent" or TPUGrid(at, len(problem.query)).splits > 1
    check(PallasTPU(sizes), problem, jnp.dtype("float32"))


BLOCKS_OF_CHIPS = {  # keys in a block: of 64k tokens, and of a cache of 64k tokens of eight heads
    None: (1024, 4096),
    "TPU v4": (1024, 4096),
    "TPU v5 lite": (1024, 16384),
    "TPU v5": (1024, 8192),
    "TPU v6 lite": (2048, 16384),
    "TPU7x": (2048, 8192),
    "TPU9": (1024, 4096),
}


@pytest.mark.parametrize("kind", BLOCKS_OF_CHIPS)
def test_blocks_of_chips(kind):
    """The blocks of another chip, or of one with more memory than a chip has of which nothing is known."""
    found = tuple(_plan(kind, queries).key_block for queries in (65536, 1))
    assert found == BLOCKS_OF_CHIPS[kind]
    assert _plan(kind, 2048).key_block == 1024
    assert _plan(kind, 65536, local_window_size=(1000, 0)).key_block == 1024


@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("name", ["forward", "backward", "tangent"])
def test_what_the_smallest_takes_all_take(name, width):
    """A call that is taken when it is traced, for the smallest chip, and declined when it is lowered."""
    for kind in BLOCKS_OF_CHIPS:
        assert _plan(kind, 65536, name, width).granted >= 16 * 2**20


def _plan(kind, queries, name="forward", width=128, **options):
    """The layout of 32 heads on a chip; a single query reads a cache of 64k tokens."""
    keys = 65536 if queries == 1 else queries
    shapes = (1, queries, 32, width), (1, keys, 8, width)
    found = []

    def plan(query, key):
        call = call_of(query, key, key, **options)
        found.append(make_layout(call.operands, call.settings, name, sizes_on(chip_of(kind))))

    jax.eval_shape(plan, *(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes))
    return found[0]
