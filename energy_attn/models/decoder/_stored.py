"""Where a weight lies in the files of a checkpoint: whole, as part of a tensor, or in a tensor for each expert."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from energy_attn.distributed.internal import Part, Tensor, safetensors

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """The tensors that hold a weight.

    Attributes:
        names: of the tensors: one, or one for each index of the weight's first axis.
        is_split: whether there is one for each index.
        swapped: whether the last two axes have changed places in the file.
        axis: of the weight, along which a tensor has more than it; None: there is none.
        start: the first index along that axis.
        step: the distance of two indices along it.
        total: the size of the tensor along it.
        dtype: in which the weight is kept whatever that of the others; None: that of the others.
    """

    names: tuple[str, ...]
    is_split: bool = False
    swapped: bool = False
    axis: int | None = None
    start: int = 0
    step: int = 1
    total: int = 0
    dtype: np.dtype | None = None

    def shape(self, weight: Shape) -> Shape:
        """The shape of each tensor of a weight of this shape."""
        sizes = list(weight)
        if self.axis is not None:
            sizes[self.axis] = self.total
        if self.swapped:
            sizes[-2:] = sizes[:-3:-1]
        return tuple(sizes[self.is_split :])

    def read(
        self, tensors: Mapping[str, Tensor], parts: Iterable[Part], dtype: np.dtype
    ) -> dict[Part, np.ndarray]:
        """Parts of the weight."""
        return {part: self._read(tensors, part, dtype) for part in parts}

    def _read(self, tensors: Mapping[str, Tensor], part: Part, dtype: np.dtype) -> np.ndarray:
        if self.is_split:
            (first, last), *rest = part
            whole = dataclasses.replace(
                self, is_split=False, axis=None if self.axis is None else self.axis - 1
            )
            out = np.empty([end - start for start, end in part], dtype)
            for row, name in zip(out, self.names[first:last], strict=True):
                one = dataclasses.replace(whole, names=(name,))
                row[...] = one._read(tensors, tuple(rest), dtype)
            return out
        bounds = list(part)
        if self.axis is not None:
            first, last = bounds[self.axis]
            start = self.start + first * self.step
            bounds[self.axis] = start, max(start, self.start + (last - 1) * self.step + 1)
        if self.swapped:
            bounds[-2:] = bounds[:-3:-1]
        box = tuple(bounds)
        data = safetensors.read(tensors[self.names[0]], [box], dtype)[box]
        data = data.swapaxes(-1, -2) if self.swapped else data
        every = [slice(None)] * data.ndim
        if self.axis is not None:
            every[self.axis] = slice(None, None, self.step)
        return np.ascontiguousarray(data[tuple(every)])

    def within(self, tensor: np.ndarray, weight: Shape) -> np.ndarray:
        """The view of a weight of this shape, or of one index of its first axis, in its tensor."""
        view = tensor.swapaxes(-1, -2) if self.swapped else tensor
        if self.axis is None:
            return view
        every = [slice(None)] * view.ndim
        end = self.start + (weight[self.axis] - 1) * self.step + 1
        every[self.axis - self.is_split] = slice(self.start, end, self.step)
        return view[tuple(every)]
