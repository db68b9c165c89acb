"""The branch that TPUs take for keys and values of eight bits, on any platform."""

import types
from collections.abc import Iterator

from energy_attn.kernels.dispatch import _eight_bits, _registry


def read_as_stored(monkeypatch) -> Iterator[list]:
    """Takes that branch, for a fixture; yields the list of operands that it will have been given."""
    given = []

    def branch(operands, *, tpu, default):
        given.append(operands)
        return tpu(operands)

    with monkeypatch.context() as patch:
        patch.setattr(_eight_bits, "lax", types.SimpleNamespace(platform_dependent=branch))
        _registry._attend.clear_cache()  # calls traced with the other branch, and then with this one
        yield given
    _registry._attend.clear_cache()
