"""Weights of four bits, by blocks of 32 that share a power of two, as gpt-oss has them; read as bfloat16.

A weight `[E, in, out]` lies in the file as `[E, out, in / 32, 16]` bytes, the earlier of two numbers in the lower half,
beside `[E, out, in / 32]` exponents. Source: OCP Microscaling Formats (MX), version 1.0, sections 5.2 and 6.3.
"""

from typing import Any

import jax.numpy as jnp  # with ml_dtypes, by which NumPy knows bfloat16
import numpy as np

from energy_attn.distributed.internal import Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BIAS, _NAN = 127, 255  # of exponents
_BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)


def unpacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, each pair of blocks and scales as one of bfloat16; raises `ValueError`."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            if whole in tensors:
                raise ValueError(
                    f"{whole}: wanted a weight or its {_BLOCKS} and {_SCALES}, got both, in {tensor.file}"
                )
            found[whole] = _weight(name, tensor, tensors.get(whole + _SCALES))
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors):
            found[name] = tensor
    return found


def _weight(name: str, blocks: Tensor, scales: Tensor | None) -> Tensor:
    if scales is None or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, _BLOCK // 2):
        given = None if scales is None else scales.shape
        raise ValueError(
            f"{name}: wanted {_BLOCK // 2} bytes for each of its scales in {blocks.file}, got "
            f"{blocks.shape} beside {given}"
        )
    if (blocks.code, scales.code) != ("U8", "U8"):
        raise ValueError(f"{name}: wanted U8 in {blocks.file}, got {blocks.code}, {scales.code}")
    experts, out, groups = scales.shape
    shape = experts, groups * _BLOCK, out
    stored = _Packed(name, blocks.stored, scales.stored)
    return Tensor(blocks.file, stored, shape, jnp.dtype(jnp.bfloat16), "BF16")


class _Packed:
    """Slices of a weight `[E, in, out]`, unpacked an expert at a time."""

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        self._name, self._blocks, self._scales = name, blocks, scales

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, inputs, outputs = index
        first, last = inputs.start // _BLOCK, -(-inputs.stop // _BLOCK)
        kept = slice(inputs.start - first * _BLOCK, inputs.stop - first * _BLOCK)
        shape = [part.stop - part.start for part in index]
        found = np.empty(shape, jnp.bfloat16)
        for row, expert in zip(found, range(experts.start, experts.stop), strict=True):
            place = slice(expert, expert + 1), outputs, slice(first, last)
            row[...] = self._expert(place)[:, kept].T
        return found

    def _expert(self, place: tuple[slice, ...]) -> np.ndarray:
        """The numbers `[out, in]` of one expert, in float32."""
        packed, scales = self._blocks[(*place, slice(None))][0], self._scales[place][0]
        if (scales == _NAN).any():
            raise ValueError(f"{self._name}: wanted scales that are numbers, got NaN")
        halves = np.stack([packed & 15, packed >> 4], -1).reshape(*scales.shape, _BLOCK)
        exponents = scales.astype(np.int32)[..., None] - _BIAS
        return np.ldexp(_VALUES[halves], exponents).reshape(len(scales), -1)
