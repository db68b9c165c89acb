"""Figures of the papers that are programs for TPUs: compilers still say what was committed."""

import pytest

from tests.support.papers import compiled_ahead, held, module

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("user_settings"), pytest.mark.full]


def test_memory():
    """Programs that have come to hold more than those committed."""
    aot = module("memory")
    for case in aot.CASES:
        if case.target == "v5p" and case.devices == 8 and case.keys == 2**17:
            before = held(case.sharded)["TPU v5p:2x2x2", 8, case.keys, case.heads]
            bound = 1.02 * before[case.method]["held"]
            assert aot.row(case)["held"] <= bound, case


def test_tables(monkeypatch):
    """Llama 3.2 1B, whose programs have come to hold or to send something else than those committed."""
    compiled_ahead("v5e", monkeypatch)
