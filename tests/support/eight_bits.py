"""How keys and values of eight bits are read, on any platform: by the branch that TPUs take, or not dequantized."""

import types
from collections.abc import Iterator

import jax

from energy_attn.kernels.call import _kernel
from energy_attn.kernels.dispatch import _derivative, _registry


def read_as_stored(monkeypatch) -> Iterator[list]:
    """Takes that branch, for a fixture; yields the list of operands that it will have been given."""
    given = []

    def branch(operands, *, tpu, default):
        given.append(operands)
        return tpu(operands)

    with monkeypatch.context() as patch:
        patch.setattr(_derivative, "lax", types.SimpleNamespace(platform_dependent=branch))
        _registry.attend.clear_cache()  # calls traced with the other branch, and then with this one
        yield given
    _registry.attend.clear_cache()


def read_by_kernels(monkeypatch) -> Iterator[None]:
    """Fails where a kernel gets keys and values dequantized, for a fixture."""

    def fail(operands):
        raise AssertionError(f"dequantized keys of {operands.key.shape}")

    jax.clear_caches()  # of programs that dequantize
    with monkeypatch.context() as patch:
        patch.setattr(_kernel, "dequantized", fail)
        yield
