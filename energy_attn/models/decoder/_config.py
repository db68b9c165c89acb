"""The configurations of models of any family, and where their weights lie in the files of a checkpoint."""

import abc
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Any, ClassVar, get_args

import equinox as eqx
import numpy as np

from energy_attn.distributed.internal import safetensors
from energy_attn.kernels.internal import checks

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredWeight:
    """The tensors of a file that hold a weight."""

    names: tuple[str, ...]  # one tensor, or one for each index of the weight's first axis
    is_split: bool = False  # whether there is one for each index
    swapped: bool = False  # whether the file has the last two axes swapped
    axis: int | None = None  # the axis along which the tensor holds more than this weight, or None
    start: int = 0  # the weight's first index along that axis
    step: int = 1  # the distance between its indices
    total: int = 0  # the size of the tensor along that axis
    dtype: np.dtype | None = None  # the dtype that the weight always has; None: the model's

    def shape(self, weight: Shape) -> Shape:
        sizes = list(weight)
        if self.axis is not None:
            sizes[self.axis] = self.total
        if self.swapped:
            sizes[-2:] = sizes[:-3:-1]
        return tuple(sizes[self.is_split :])

    def _slices(self, part: safetensors.Part) -> tuple[slice, ...]:
        """The slices of a tensor, with its axes in the weight's order, that hold a part of the weight."""
        slices = [slice(*bounds) for bounds in part]
        if self.axis is not None:
            axis = self.axis - self.is_split
            first, last = part[axis]
            start = self.start + first * self.step
            stop = max(start, self.start + (last - 1) * self.step + 1)
            slices[axis] = slice(start, stop, self.step)
        return tuple(slices)

    def read(
        self, tensors: Mapping[str, safetensors.Tensor], part: safetensors.Part, dtype: np.dtype
    ) -> np.ndarray:
        slices = self._slices(part[self.is_split :])
        bounds = [(x.start, x.stop) for x in slices]
        if self.swapped:
            bounds[-2:] = bounds[:-3:-1]
        box, steps = tuple(bounds), tuple(slice(None, None, x.step) for x in slices)

        def one(name: str) -> np.ndarray:
            data = safetensors.read(tensors[name], box, dtype)
            return np.ascontiguousarray((data.swapaxes(-1, -2) if self.swapped else data)[steps])

        if not self.is_split:
            return one(self.names[0])
        out = np.empty([end - start for start, end in part], dtype)
        for row, name in zip(out, self.names[slice(*part[0])], strict=True):
            row[...] = one(name)
        return out

    def within(self, tensor: np.ndarray, weight: Shape) -> np.ndarray:
        """Returns the view of a tensor that holds a weight of this shape, or one index of its first axis."""
        view = tensor.swapaxes(-1, -2) if self.swapped else tensor
        return view[self._slices(tuple((0, size) for size in weight[self.is_split :]))]


class AbstractModelConfig(abc.ABC):
    """The sizes of a model that its checkpoints and its sharding need, under Hugging Face's names.

    A configuration is hashable, as it is a static field of its model: a frozen dataclass.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]  # as `dataclasses.replace` needs them
    vocab_size: int  # number of tokens
    intermediate_size: int  # width inside the MLP
    num_hidden_layers: int  # number of layers
    num_attention_heads: int  # number of query heads

    @abc.abstractmethod
    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """Returns the place in a checkpoint of the weight of this name and shape."""

    @abc.abstractmethod
    def ignores(self, name: str, names: Collection[str]) -> bool:
        """Whether a checkpoint with tensors of these `names` may have this one, which holds none of its weights."""

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
    """Weights of experts, stacked along their first axis; `dataclasses.replace` sets the `axis`."""

    axis: eqx.AbstractVar[str | None]  # the mesh axis that the experts are sharded over, or None


def check_numbers(
    config: Any, positive: Collection[str] = (), least: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Checks the numbers and flags of a dataclass by the types of its fields; a default of None is allowed.

    Integers are at least 1, or `least`; numbers in `positive` are above 0. Raises `TypeError` or `ValueError`.
    """
    for field in dataclasses.fields(config):
        name, x = field.name, getattr(config, field.name)
        kinds = get_args(field.type) if isinstance(field.type, UnionType) else (field.type,)
        if x is None and field.default is None:
            continue
        if bool in kinds:
            checks.check_flag(name, x)
        elif int in kinds:
            checks.check_integer(name, x, least.get(name, 1))
        elif float in kinds:
            (check_positive if name in positive else checks.check_finite_number)(name, x)


def check_type(name: str, x: object, kind: type | UnionType, wanted: str) -> None:
    if not isinstance(x, kind):
        raise TypeError(f"{name}: wanted {wanted}, got {checks.received(x)}")


def check_that(config: object, name: str, holds: bool, wanted: str) -> None:
    """Raises `ValueError` for a field of a dataclass, unless a condition holds."""
    if not holds:
        raise ValueError(f"{name}: wanted {wanted}, got {getattr(config, name)}")


def check_positive(name: str, x: object) -> float:
    number = checks.check_finite_number(name, x)
    if number <= 0:
        raise ValueError(f"{name}: wanted more than 0, got {x}")
    return number


class AbstractModel(eqx.Module):
    """A model whose `config` knows its checkpoints and its sharding on a mesh."""

    config: eqx.AbstractVar[Any]  # an `AbstractModelConfig`; to pyright, fields are invariant
