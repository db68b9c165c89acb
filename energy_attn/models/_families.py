"""The families of decoders whose checkpoints can be read."""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from .checkpoint._load import load
from .decoder._decoder import AbstractDecoder
from .decoder._family import Family
from .llama._llama import LLAMA

# By the `model_type` of their checkpoints.
FAMILIES: Mapping[str, Family] = MappingProxyType({"llama": LLAMA})


def load_decoder(
    directory: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    tensor: str = "tensor",
    progress: bool | Callable[[float, str], Any] | None = None,
) -> AbstractDecoder:
    """The decoder of a checkpoint, of whichever family; otherwise as `Llama.load`."""
    options = {"mesh": mesh, "dtype": dtype, "tensor": tensor, "progress": progress}
    return load(directory, FAMILIES, **options)
