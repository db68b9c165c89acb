"""The forms in which the TPU kernels take keys: which one a call gets depends on sizes that no quick test has.

`test_local_attention.py` judges them in the form that its small problems get, and in blocks with heads folded into the
keys; here the others, forced by the sizes that choose.
"""

import jax
import jax.numpy as jnp
import pytest

from energy_attn.kernels import _pallas_tpu_layout
from energy_attn.kernels._arguments import check_call

from ..problems import BLOCKS, HEADS, cast
from .test_local_attention import check

SMALL = {"ROWS": 16, "KEYS": 8, "KEYS_OF_FEW_ROWS": 8, "KEYS_BACKWARD": 8}
FORMS = {
    "heads in front": {"FEW_ROWS": 0, "LANES": 1, "SUBLANES": 1},
    "keys last": {"LANES": 8, "SUBLANES": 8},
}
PROBLEMS = [BLOCKS["blocks_predicates"], BLOCKS["blocks_causal"], HEADS["heads_16_2"]]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    for name, size in (SMALL | FORMS[request.param]).items():
        monkeypatch.setattr(_pallas_tpu_layout, name, size)
    jax.clear_caches()  # the sizes are no part of what programs are kept by
    yield request.param
    jax.clear_caches()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_forms(form, problem):
    """A head, a block or a turned axis mistaken for another, forward or backward."""
    if problem.query.shape[-1] % 8 == 0 and form == "keys last":
        return  # as wide as whole lanes: this form is for others
    call = check_call(**cast(problem, jnp.float32)[0], **problem.options)
    for backward in (False, True):
        at = _pallas_tpu_layout.layout(call.operands, call.settings, backward=backward)
        assert at.key_blocks > 1
        if form == "heads in front":
            assert at.heads == problem.key.shape[2] and not (at.tall_key or at.tall_value)
        else:
            assert at.tall_key or at.tall_value
    check("pallas_tpu", problem, jnp.dtype("float32"))
