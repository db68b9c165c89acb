"""The policy of a call: which kernels, which method and which runs of keys, asked of one object."""

import pytest

from energy_attn.kernels.dispatch._registry import reproducible_kernels
from energy_attn.kernels.internal import CallPolicy, call_policy


def test_calls_are_left_as_they_are():
    """A default that changes the method or the kernels of a layout."""
    policy = call_policy("blockwise")
    assert policy == CallPolicy(("blockwise",)) and policy.method is None and policy.run is None
    assert not (policy.folds_sinks or policy.attention_only or policy.row_tiles or policy.leaf)
    assert policy.laid_out(256) is policy and policy.reads_trees
    assert policy.bind(dict, 256)() == {}


@pytest.mark.parametrize("given", [(None, True), (reproducible_kernels(512),)])
def test_reproducible_calls(given):
    """Canonical kernels that are named, as by a decoder, taken for any others."""
    policy = call_policy(*given)
    assert policy.method == "reproducible" and policy.folds_sinks and policy.attention_only
    assert policy.run == (None if given[0] is None else 512)
    laid_out = policy.laid_out(256)
    assert laid_out.run == 256 and laid_out.kernels == reproducible_kernels(256)
    assert policy.bind(dict, 256)() == {"implementation": laid_out.kernels}
    assert policy.row_tiles and policy.leaf == 256 and not policy.reads_trees
    assert laid_out.laid_out(None) == call_policy(None, True)
    # static: compared and hashed
    assert len({policy, laid_out, call_policy(*given), call_policy(None)}) == 3
