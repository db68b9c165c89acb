"""Reads a decoder from a folder with Hugging Face's `config.json` and safetensors files."""

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from energy_attn.distributed.internal import Part, Tensor, files, safetensors
from energy_attn.kernels.internal import FLOATING, check_floating_dtype

from ...functional._progress import Progress, progress_of
from ..decoder._config import (
    AbstractDecoderConfig,
    AbstractModel,
    AbstractModelConfig,
    StoredWeight,
)
from ..decoder._decoder import Family
from ._config import (
    CONFIG,
    INDEX,
    WHOLE,
    identity_of,
    inside,
    located,
    read_config,
    read_index,
    with_end_tokens,
)
from ._mxfp4 import unpacked
from ._shard import along, shardings

_PICKLES = ("*.bin", "*.pt", "*.pth")
_LAYER = re.compile(r"\blayers?\.(\d+)\.")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SHOWN = 3  # names in an error


def load(
    directory: object,
    families: Mapping[str, Family],
    *,
    mesh: Mesh | None,
    dtype: DTypeLike | None,
    tensor: str,
    progress: bool | Progress | None,
) -> Any:
    """The decoder in a folder, of one of `families`. Raises as `models.load`, before it reads a weight."""
    folder = located(directory)
    if not folder.is_dir():
        raise ValueError(
            f"directory: wanted a folder on this machine, got {folder}, which is none: nothing is "
            "downloaded"
        )
    if dtype is not None:
        dtype = check_floating_dtype("dtype", dtype)

    def read() -> tuple[AbstractModelConfig, Family, dict[str, Tensor]]:
        tensors, save = _stored(folder)
        config, family = read_config(folder, families, save)
        return with_end_tokens(config, folder), family, unpacked(tensors)

    config, family, stored_tensors = files.steady(folder, (WHOLE, INDEX, CONFIG), read)
    _check_layers(folder, config, stored_tensors)
    config = _with_own_head(config, stored_tensors)
    model = eqx.filter_eval_shape(family.build, config, key=jax.random.key(0))
    names, leaves = named(model)
    places = [config.stored(name, x.shape) for name, x in zip(names, leaves, strict=True)]
    found = _matching(folder, stored_tensors, places, leaves, config, dtype)
    dtype = jax.dtypes.canonicalize_dtype(found if dtype is None else dtype)
    if mesh is None:
        in_force = jax.sharding.get_mesh()
        mesh = None if in_force.empty else in_force
    targets = [None] * len(leaves) if mesh is None else shardings(model, mesh, tensor)
    total, done, arrays = sum(leaf.size for leaf in leaves), 0, []
    with progress_of(f"reading {folder.name}", progress) as show:
        for name, place, leaf, target in zip(names, places, leaves, targets, strict=True):
            # one at a time, so that the host holds at most one weight
            kind = dtype if place.dtype is None else place.dtype
            array = _array(stored_tensors, place, leaf.shape, target, kind)
            arrays.append(jax.block_until_ready(array))
            done += arrays[-1].size
            show(done / total, name)
    model = jax.tree.unflatten(jax.tree.structure(model), arrays)
    return model if mesh is None else along(model, mesh, tensor)


def _array(
    tensors: Mapping[str, Tensor],
    place: StoredWeight,
    shape: tuple[int, ...],
    sharding: NamedSharding | None,
    dtype: np.dtype,
) -> Array:
    """A weight on its devices; this process reads the parts that its own devices hold."""
    if sharding is None:
        bounds = tuple((0, size) for size in shape)
        return jax.device_put(place.read(tensors, bounds, dtype))
    indices = sharding.addressable_devices_indices_map(shape).values()
    data = {x: place.read(tensors, x, dtype) for x in {_part(index, shape) for index in indices}}
    return jax.make_array_from_callback(shape, sharding, lambda index: data[_part(index, shape)])


def _part(index: Any, shape: tuple[int, ...]) -> Part:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def named(model: AbstractModel) -> tuple[list[str], list[Any]]:
    """The weights of a decoder, and their names; a checkpoint may have others."""
    names, leaves = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names.append(name if name.startswith("lm_head.") else f"model.{name}")
        leaves.append(leaf)
    return names, leaves


def _stored(folder: Path) -> tuple[dict[str, Tensor], str | None]:
    if os.path.lexists(single := inside(folder, WHOLE)):
        header = safetensors.header(single)
        return header.tensors, identity_of(header.metadata)
    if not inside(folder, INDEX).exists():
        if pickles := [file.name for kind in _PICKLES for file in folder.glob(kind)]:
            raise ValueError(
                f"directory: wanted {WHOLE} or {INDEX}, got {pickles[0]}: only safetensors is "
                "read, as nothing is unpickled; write it anew with save_pretrained of transformers"
            )
        raise ValueError(f"directory: wanted {WHOLE} or {INDEX} in it, got {folder}")
    file_of, save = read_index(folder)
    headers = {
        name: safetensors.header(inside(folder, name)) for name in sorted(set(file_of.values()))
    }
    for name, header in headers.items():
        other = identity_of(header.metadata)
        if save not in (None, other):
            raise ValueError(
                f"{folder / name}: wanted a file of the save {save}, as {INDEX} says, got {other}"
            )
    for name, file in file_of.items():
        if name not in headers[file].tensors:
            raise ValueError(f"{name}: wanted it in {folder / file}, as {INDEX} says, got none")
    found = {name: headers[file].tensors[name] for name, file in file_of.items()}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            other = found.setdefault(name, tensor)
            if other is not tensor and not safetensors.equal(other, tensor):
                raise ValueError(
                    f"{name}: wanted one tensor of this name, got two that differ, in {other.file} and "
                    f"{tensor.file}"
                )
    return found, save


def _with_own_head(
    config: AbstractModelConfig, stored: Mapping[str, Tensor]
) -> AbstractModelConfig:
    """The configuration without tied embeddings if the files have another head; transformers uses it, too."""
    if not (isinstance(config, AbstractDecoderConfig) and config.tie_word_embeddings):
        return config
    both = [stored[name] for name in (_HEAD, _EMBEDDING) if name in stored]
    if len(both) < 2 or safetensors.equal(*both):
        return config
    warnings.warn(
        f"{both[0].file}: {_HEAD} differs from the embedding, so that it is the output projection, "
        f"although tie_word_embeddings is true in {CONFIG}",
        stacklevel=4,
    )
    own: Any = config
    return dataclasses.replace(own, tie_word_embeddings=False)


def _check_layers(folder: Path, config: AbstractModelConfig, stored: Mapping[str, Tensor]) -> None:
    layers = {match[1] for name in stored if (match := _LAYER.search(name))}
    if not layers:
        raise ValueError(
            f"directory: wanted tensors of {config.num_hidden_layers} layers, got "
            f"{_listed(list(stored)) or 'no tensors'}, in {folder}{_not_read(folder)}"
        )
    if config.num_hidden_layers > len(layers):
        raise ValueError(
            f"num_hidden_layers: wanted at most the {len(layers)} layers whose tensors are in the "
            f"files, got {config.num_hidden_layers} in {CONFIG}{_not_read(folder)}"
        )


def _not_read(folder: Path) -> str:
    """The end of an error about missing tensors, where the folder has an index that is not read."""
    both = all(os.path.lexists(folder / name) for name in (WHOLE, INDEX))
    return f": {INDEX} is not read beside {WHOLE}" if both else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _check_prefix(missing: list[str], stored: Mapping[str, Tensor]) -> None:
    """Raises `ValueError` if a missing tensor is there under a longer or a shorter name."""
    for name in missing[:_SHOWN]:
        for other, tensor in stored.items():
            if other.endswith(f".{name}"):
                said = f"names in the file begin with {other.removesuffix(name)!r}"
            elif name.endswith(f".{other}"):
                said = f"names without {name.removesuffix(other)!r}"
            else:
                continue
            raise ValueError(
                f"directory: wanted names such as {name}, got {other}, in {tensor.file}: {said}"
            )


def _matching(
    folder: Path,
    stored: Mapping[str, Tensor],
    places: list[StoredWeight],
    leaves: list[Any],
    config: AbstractModelConfig,
    dtype: np.dtype | None,
) -> np.dtype:
    """Checks all tensors and returns their dtype; raises `ValueError` with the name of a wrong one."""
    shapes = {
        name: place.shape(leaf.shape)
        for place, leaf in zip(places, leaves, strict=True)
        for name in place.names
    }
    own = {name for place in places if place.dtype is not None for name in place.names}
    unexpected = [
        name for name in stored if name not in shapes and not config.ignores(name, stored)
    ]
    missing = [name for name in shapes if name not in stored]
    _check_prefix(missing, stored)
    if missing:
        raise ValueError(
            f"directory: wanted all tensors of the model, got it without {_listed(missing)}, in "
            f"{folder}{_not_read(folder)}"
        )
    if unexpected:
        raise ValueError(
            f"directory: wanted no other tensors, got it with {_listed(unexpected)}, in "
            f"{stored[unexpected[0]].file}"
        )
    first = next(name for name in shapes if name not in own)
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.dtype is None or tensor.dtype not in FLOATING:
            raise ValueError(
                f"{name}: wanted float16, bfloat16, float32 or float64 in {tensor.file}, "
                f"got {tensor.code}"
            )
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: wanted shape {shape} by {CONFIG}, got {tensor.shape} in {tensor.file}"
            )
        if dtype is None and tensor.dtype != stored[first].dtype and name not in own:
            raise ValueError(
                f"{name}: wanted {stored[first].dtype} as in {first}, or dtype=..., got "
                f"{tensor.dtype} in {tensor.file}"
            )
    found = stored[first].dtype
    assert found is not None
    return found
