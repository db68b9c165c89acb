"""The layouts in which the TPU kernels take keys, which depend on sizes that no quick test has.

`test_local_attention.py` checks the layout of its small problems, and blocks with heads folded into the keys; this file
checks the others, by sizes that force them.
"""

import jax.numpy as jnp
import pytest

from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.pallas.tpu._kernel import PallasTPU
from energy_attn.kernels.pallas.tpu._layout import layout

from ..problems import BLOCKS, HEADS, cast
from ..selection import few_rows
from .traits import SMALL_LAYOUT, check

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
    call = check_call(**cast(problem, jnp.float32)[0], **problem.options)
    for kind in ("forward", "backward", "tangent"):
        at = layout(call.operands, call.settings, kind, sizes)
        assert at.key_blocks > 1
        assert (form == "keys last") == (at.tall_key or at.tall_value)
        if form == "heads in front":
            assert at.heads == problem.key.shape[2]
        if form == "keys split":
            assert at.row_blocks == 1 and at.key_blocks % 2 == 1
    check(PallasTPU(sizes), problem, jnp.dtype("float32"))
