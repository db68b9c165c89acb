"""The configurations of models of any family, and where their weights lie in the files of a checkpoint."""

import abc
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Any, get_args

import equinox as eqx
import numpy as np

from energy_attn.distributed.internal import Part, Tensor, safetensors
from energy_attn.kernels.internal import check_finite_number, check_flag, check_integer

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredWeight:
    """The tensors that hold a weight."""

    names: tuple[str, ...]  # one, or one for each index of the weight's first axis
    is_split: bool = False  # whether there is one for each index
    swapped: bool = False  # whether the last two axes have changed places in the file
    # the axis of the weight along which a tensor has more than it, or None
    axis: int | None = None
    start: int = 0  # the first index along that axis
    step: int = 1  # the distance of two indices along it
    total: int = 0  # the size of the tensor along it
    # in which the weight is kept; None: that of the others
    dtype: np.dtype | None = None

    def shape(self, weight: Shape) -> Shape:
        """The shape of each tensor of a weight of this shape."""
        sizes = list(weight)
        if self.axis is not None:
            sizes[self.axis] = self.total
        if self.swapped:
            sizes[-2:] = sizes[:-3:-1]
        return tuple(sizes[self.is_split :])

    def read(self, tensors: Mapping[str, Tensor], part: Part, dtype: np.dtype) -> np.ndarray:
        """A part of the weight."""
        if self.is_split:
            (first, last), *rest = part
            whole = dataclasses.replace(
                self, is_split=False, axis=None if self.axis is None else self.axis - 1
            )
            out = np.empty([end - start for start, end in part], dtype)
            for row, name in zip(out, self.names[first:last], strict=True):
                one = dataclasses.replace(whole, names=(name,))
                row[...] = one.read(tensors, tuple(rest), dtype)
            return out
        bounds = list(part)
        if self.axis is not None:
            first, last = bounds[self.axis]
            start = self.start + first * self.step
            bounds[self.axis] = start, max(start, self.start + (last - 1) * self.step + 1)
        if self.swapped:
            bounds[-2:] = bounds[:-3:-1]
        box = tuple(bounds)
        data = safetensors.read(tensors[self.names[0]], box, dtype)
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


class AbstractModelConfig(abc.ABC):
    """The sizes of a model that its checkpoints need, and its sharding, under Hugging Face's names.

    A configuration is hashable, as it is a static field of its model: a frozen dataclass.
    """

    vocab_size: int  # number of tokens
    intermediate_size: int  # width inside the MLP
    num_hidden_layers: int  # number of layers
    num_attention_heads: int  # number of query heads

    @abc.abstractmethod
    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """Returns the place in a checkpoint of the weight of this name and shape."""

    @abc.abstractmethod
    def ignores(self, name: str, names: Collection[str]) -> bool:
        """Whether a tensor of a checkpoint with these `names` has no weight of the model, and may be there."""

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]: ...


class AbstractDecoderConfig(AbstractModelConfig):
    """Further sizes of a decoder, for generation and caches."""

    num_key_value_heads: int  # number of key/value heads, a divisor of the query heads
    head_dim: int  # width of queries and keys
    tie_word_embeddings: bool  # whether the output projection is the embedding
    eos_token_id: tuple[int, ...]  # the tokens that end a text

    @property
    @abc.abstractmethod
    def value_dim(self) -> int: ...
    @property
    @abc.abstractmethod
    def context_length(self) -> int: ...


class AbstractExperts(eqx.Module):
    """Weights of experts, stacked along their first axis; a dataclass without an `__init__` of its own.

    `axis` is the mesh axis that the experts are sharded over, which [`shard`][energy_attn.models.shard] sets, or None.
    """

    axis: eqx.AbstractVar[str | None]


def check_numbers(
    config: Any, positive: Collection[str] = (), least: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Checks the numbers and flags of a dataclass by the types of its fields; None may be where it is the default.

    Integers are at least 1, or `least`; numbers in `positive` are above 0. Raises `TypeError` or `ValueError`.
    """
    for field in dataclasses.fields(config):
        name, x = field.name, getattr(config, field.name)
        kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        if x is None and field.default is None:
            continue
        if bool in kinds:
            check_flag(name, x)
        elif int in kinds:
            check_integer(name, x, least.get(name, 1))
        elif float in kinds:
            (check_positive if name in positive else check_finite_number)(name, x)


def check_positive(name: str, x: object) -> float:
    """Returns `x`, a number above 0; raises `TypeError` or `ValueError` for anything else."""
    number = check_finite_number(name, x)
    if number <= 0:
        raise ValueError(f"{name}: wanted more than 0, got {x}")
    return number


class AbstractModel(eqx.Module):
    """A model that has checkpoints, and a sharding on a mesh, by its `config`."""

    config: eqx.AbstractVar[Any]  # an `AbstractModelConfig`; to pyright, fields are invariant
