"""Figures of the papers that are programs for GPUs: compilers still say what was committed."""

import pytest

from tests.support.papers import compiled_ahead

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("user_settings"), pytest.mark.full]


def test_tables(monkeypatch):
    """Llama 3.2 1B, whose programs have come to hold or to send something else than those committed."""
    compiled_ahead("rtx4090", monkeypatch)
