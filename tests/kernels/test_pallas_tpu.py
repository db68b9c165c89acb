"""The forms in which the TPU kernels take keys: which one a call gets depends on sizes that no quick test has.

`test_local_attention.py` judges them in the form that its small problems get, and in blocks with heads folded into the
keys; here the others, forced by the sizes that choose.
"""

import jax
import jax.numpy as jnp
import pytest

from energy_attn.kernels.call._arguments import check_call
from energy_attn.kernels.pallas.tpu import _layout

from ..problems import BLOCKS, HEADS, cast
from .test_local_attention import check

SMALL = {"ROWS": 16, "KEYS": 8, "KEYS_OF_FEW_ROWS": 8, "KEYS_BACKWARD": 8}
FORMS = {
    "heads in front": {"FEW_ROWS": 0, "LANES": 1, "SUBLANES": 1},
    "keys last": {"LANES": 8, "SUBLANES": 8},
    "keys shared out": {"LANES": 1, "SUBLANES": 1, "ROWS": 512},
}
CASES = [
    ("heads in front", BLOCKS["blocks_predicates"]),
    ("heads in front", HEADS["heads_16_2"]),
    ("keys last", BLOCKS["blocks_predicates"]),
    ("keys last", BLOCKS["blocks_causal"]),
    ("keys shared out", HEADS["heads_8_8"]),
]


@pytest.mark.parametrize(("form", "problem"), CASES, ids=str)
def test_forms(form, problem, monkeypatch):
    """A head, a block or a turned axis mistaken for another, forward or backward; the odd block of two shares lost."""
    for name, size in (SMALL | FORMS[form]).items():
        monkeypatch.setattr(_layout, name, size)
    call = check_call(**cast(problem, jnp.float32)[0], **problem.options)
    for backward in (False, True):
        at = _layout.layout(call.operands, call.settings, backward=backward)
        assert at.key_blocks > 1
        assert (form == "keys last") == (at.tall_key or at.tall_value)
        if form == "heads in front":
            assert at.heads == problem.key.shape[2]
        if form == "keys shared out":
            assert at.row_blocks == 1 and at.key_blocks % 2 == 1
    jax.clear_caches()  # the sizes are no part of what programs are kept by
    check("pallas_tpu", problem, jnp.dtype("float32"))
    jax.clear_caches()
