"""The paper's figure 4 for TPUs: the compiler still says what was committed."""

import pytest

from papers.tree_attention import memory
from tests.support.papers import held

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings"), pytest.mark.full]


def test_memory():
    """Programs that have come to hold more than those committed."""
    for case in memory.CASES:
        if case.target == "v5p" and case.devices == 8 and case.keys == 2**17:
            before = held(case.sharded)["TPU v5p:2x2x2", 8, case.keys, case.heads]
            bound = 1.02 * before[case.method]["held"]
            assert memory.row(case)["held"] <= bound, case
