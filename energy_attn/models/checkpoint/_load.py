"""Reads a decoder from a folder with Hugging Face's `config.json` and safetensors files."""

import os
import re
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
from ..decoder._config import AbstractModelConfig
from ..decoder._decoder import AbstractModel, Family
from ..decoder._stored import Stored
from . import _folder
from ._config import with_end_tokens
from ._folder import CONFIG, INDEX, WHOLE
from ._mxfp4 import unpacked
from ._shard import along, shardings

_PICKLES = ("*.bin", "*.pt", "*.pth")
_LAYER = re.compile(r"\blayers?\.(\d+)\.")
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
    """The decoder in a folder, of one of `families`. Raises as `Llama.load`, before it reads a weight."""
    folder = _folder.located(directory)
    if not folder.is_dir():
        raise ValueError(
            f"directory: wanted a folder on this machine, got {folder}, which is none: nothing is "
            "downloaded"
        )
    if dtype is not None:
        dtype = check_floating_dtype("dtype", dtype)

    def read() -> tuple[AbstractModelConfig, Family, dict[str, Tensor]]:
        tensors, save = _stored(folder)
        config, family = _folder.config(folder, families, save)
        return with_end_tokens(config, folder), family, unpacked(tensors)

    config, family, stored_tensors = files.steady(folder, (WHOLE, INDEX, CONFIG), read)
    _check_layers(config, stored_tensors)
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
    place: Stored,
    shape: tuple[int, ...],
    sharding: NamedSharding | None,
    dtype: np.dtype,
) -> Array:
    """A weight on its devices; this process reads the parts that its own devices hold."""
    if sharding is None:
        bounds = tuple((0, size) for size in shape)
        return jax.device_put(place.read(tensors, [bounds], dtype)[bounds])
    indices = sharding.addressable_devices_indices_map(shape).values()
    data = place.read(tensors, {_part(index, shape) for index in indices}, dtype)
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
    """The tensors in the files of a folder, by name, and their save; raises `ValueError`."""
    if os.path.lexists(single := _folder.inside(folder, WHOLE)):
        header = safetensors.header(single)
        return header.tensors, _folder.identity_of(header.metadata)
    if not _folder.inside(folder, INDEX).exists():
        if pickles := [file.name for kind in _PICKLES for file in folder.glob(kind)]:
            raise ValueError(
                f"directory: wanted {WHOLE} or {INDEX}, got {pickles[0]}: only safetensors is "
                "read, as nothing is unpickled; write it anew with save_pretrained of transformers"
            )
        raise ValueError(f"directory: wanted {WHOLE} or {INDEX} in it, got {folder}")
    file_of, save = _folder.index(folder)
    headers = {
        name: safetensors.header(_folder.inside(folder, name)) for name in set(file_of.values())
    }
    for name, header in headers.items():
        other = _folder.identity_of(header.metadata)
        if save not in (None, other):
            raise ValueError(
                f"{folder / name}: wanted a file of the save {save}, as {INDEX} says, got {other}"
            )
    for name, file in file_of.items():
        if name not in headers[file].tensors:
            raise ValueError(f"{name}: wanted it in {folder / file}, as {INDEX} says, got none")
    return {name: headers[file].tensors[name] for name, file in file_of.items()}, save


def _check_layers(config: AbstractModelConfig, stored: Mapping[str, Tensor]) -> None:
    """Raises `ValueError` for more layers than the files have, before the model is built."""
    layers = {match[1] for name in stored if (match := _LAYER.search(name))}
    if config.num_hidden_layers > len(layers):
        raise ValueError(
            f"num_hidden_layers: wanted at most the {len(layers)} layers whose tensors are in the "
            f"files, got {config.num_hidden_layers} in {CONFIG}"
        )


def _matching(
    folder: Path,
    stored: Mapping[str, Tensor],
    places: list[Stored],
    leaves: list[Any],
    config: AbstractModelConfig,
    dtype: np.dtype | None,
) -> np.dtype:
    """The dtype of the tensors, all of which are checked; raises `ValueError`, which names a wrong one."""
    shapes = {
        name: place.shape(leaf.shape)
        for place, leaf in zip(places, leaves, strict=True)
        for name in place.names
    }
    own = {name for place in places if place.dtype is not None for name in place.names}
    unexpected = [name for name in stored if name not in shapes and not config.ignores(name)]
    missing = [name for name in shapes if name not in stored]
    for expected, wrong in (
        ("all tensors of the model", missing),
        ("no other tensors", unexpected),
    ):
        if wrong:
            more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            preposition = "without" if wrong is missing else "with"
            place = folder if wrong is missing else stored[wrong[0]].file
            raise ValueError(
                f"directory: wanted {expected}, got it {preposition} {', '.join(wrong[:_SHOWN])}{more}, "
                f"in {place}"
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
