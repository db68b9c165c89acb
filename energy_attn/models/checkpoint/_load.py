"""Reads a model from a folder with Hugging Face's `config.json` and safetensors files."""

import dataclasses
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array

from energy_attn.distributed.internal import files, safetensors
from energy_attn.kernels.internal import checks

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
)
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
    """Returns the model in a folder, of one of `families`; raises as `models.load`, before it reads a weight."""
    folder = located(directory)
    if not folder.is_dir():
        raise ValueError(
            f"directory: wanted a folder on this machine, got {folder}; download the checkpoint first"
        )
    if dtype is not None:
        dtype = checks.check_floating_dtype("dtype", dtype)

    def read() -> tuple[AbstractModelConfig, Family, dict[str, safetensors.Tensor]]:
        tensors, save = _stored(folder)
        config, family = read_config(folder, families, save)
        return config, family, dict(family.tensors(unpacked(tensors)))

    config, family, stored_tensors = files.steady(folder, (WHOLE, INDEX, CONFIG), read)
    _check_layers(folder, config, stored_tensors)
    config = _with_own_head(config, stored_tensors)
    model = eqx.filter_eval_shape(family.build, config, key=jax.random.key(0))
    leaves = named(model)
    places = {name: config.stored(name, x.shape) for name, x in leaves.items()}
    stored_dtype = _matching(folder, stored_tensors, places, leaves, config, dtype)
    dtype = jax.dtypes.canonicalize_dtype(stored_dtype if dtype is None else dtype)
    if mesh is None:
        in_force = jax.sharding.get_mesh()
        mesh = None if in_force.empty else in_force
    targets = [None] * len(leaves) if mesh is None else shardings(model, mesh, tensor)
    total, done, arrays = sum(leaf.size for leaf in leaves.values()), 0, []
    with progress_of(f"reading {folder.name}", progress) as show:
        for (name, place), target in zip(places.items(), targets, strict=True):
            # one at a time, so that the host holds at most one weight
            kind = dtype if place.dtype is None else place.dtype
            array = _array(stored_tensors, place, leaves[name].shape, target, kind)
            arrays.append(jax.block_until_ready(array))
            done += arrays[-1].size
            show(done / total, name)
    model = jax.tree.unflatten(jax.tree.structure(model), arrays)
    return model if mesh is None else along(model, mesh, tensor)


def _array(
    tensors: Mapping[str, safetensors.Tensor],
    place: StoredWeight,
    shape: tuple[int, ...],
    sharding: NamedSharding | None,
    dtype: np.dtype,
) -> Array:
    """Returns a weight on its devices; each process reads the parts that its own devices hold."""
    if sharding is None:
        bounds = tuple((0, size) for size in shape)
        return jax.device_put(place.read(tensors, bounds, dtype))
    indices = sharding.addressable_devices_indices_map(shape).values()
    data = {x: place.read(tensors, x, dtype) for x in {_part(index, shape) for index in indices}}
    return jax.make_array_from_callback(shape, sharding, lambda index: data[_part(index, shape)])


def _part(index: Any, shape: tuple[int, ...]) -> safetensors.Part:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def named(model: AbstractModel) -> dict[str, Any]:
    """Returns the weights of a model by their names here, which a checkpoint may have changed."""
    weights = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        weights[name if name.startswith("lm_head.") else f"model.{name}"] = leaf
    return weights


def _stored(folder: Path) -> tuple[dict[str, safetensors.Tensor], str | None]:
    if os.path.lexists(single := inside(folder, WHOLE)):
        header = safetensors.header(single)
        return header.tensors, identity_of(header.metadata)
    if not inside(folder, INDEX).exists():
        if pickles := [file.name for kind in _PICKLES for file in folder.glob(kind)]:
            raise ValueError(
                f"directory: wanted {WHOLE} or {INDEX}, got {pickles[0]}; write it as "
                "safetensors with save_pretrained of transformers, as nothing is unpickled here"
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
    tensors = {name: headers[file].tensors[name] for name, file in file_of.items()}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            other = tensors.setdefault(name, tensor)
            if other is not tensor and not safetensors.equal(other, tensor):
                raise ValueError(
                    f"{name}: wanted one tensor of this name, got two that differ, in {other.file} and "
                    f"{tensor.file}"
                )
    return tensors, save


def _with_own_head(
    config: AbstractModelConfig, stored: Mapping[str, safetensors.Tensor]
) -> AbstractModelConfig:
    """Unties the embeddings of a configuration if the files have another head, which transformers uses too."""
    if not (isinstance(config, AbstractDecoderConfig) and config.tie_word_embeddings):
        return config
    both = [stored[name] for name in (_HEAD, _EMBEDDING) if name in stored]
    if len(both) < 2 or safetensors.equal(*both):
        return config
    warnings.warn(
        f"{both[0].file}: {_HEAD} differs from the embedding and is used as the output projection, "
        f"although tie_word_embeddings is true in {CONFIG}",
        stacklevel=4,
    )
    return dataclasses.replace(config, tie_word_embeddings=False)


def _check_layers(
    folder: Path, config: AbstractModelConfig, stored: Mapping[str, safetensors.Tensor]
) -> None:
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
    both = all(os.path.lexists(folder / name) for name in (WHOLE, INDEX))
    return f": {INDEX} is ignored, as there is a {WHOLE}" if both else ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _matching(
    folder: Path,
    stored: Mapping[str, safetensors.Tensor],
    places: Mapping[str, StoredWeight],
    leaves: Mapping[str, Any],
    config: AbstractModelConfig,
    dtype: np.dtype | None,
) -> np.dtype:
    shapes = {
        tensor: place.shape(leaves[name].shape)
        for name, place in places.items()
        for tensor in place.names
    }
    has_fixed_dtype = {
        name for place in places.values() if place.dtype is not None for name in place.names
    }
    unexpected = [
        name for name in stored if name not in shapes and not config.ignores(name, stored)
    ]
    missing = [name for name in shapes if name not in stored]
    for name in missing[:_SHOWN]:
        for other, tensor in stored.items():
            if other.endswith(f".{name}"):
                reason = f"names in the file begin with {other.removesuffix(name)!r}"
            elif name.endswith(f".{other}"):
                reason = f"names in the file lack {name.removesuffix(other)!r}"
            else:
                continue
            raise ValueError(
                f"directory: wanted names such as {name}, got {other}, in {tensor.file}: {reason}"
            )
    if missing:
        raise ValueError(
            f"directory: wanted all tensors of the model, got none for {_listed(missing)}, in "
            f"{folder}{_not_read(folder)}"
        )
    if unexpected:
        raise ValueError(
            f"directory: wanted no other tensors, got {_listed(unexpected)}, in "
            f"{stored[unexpected[0]].file}"
        )
    first = next(name for name in shapes if name not in has_fixed_dtype)
    for name, shape in shapes.items():
        tensor = stored[name]
        if tensor.dtype is None or tensor.dtype not in checks.FLOATING:
            raise ValueError(
                f"{name}: wanted float16, bfloat16, float32 or float64 in {tensor.file}, "
                f"got {tensor.code}"
            )
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: wanted shape {shape} by {CONFIG}, got {tensor.shape} in {tensor.file}"
            )
        if dtype is None and tensor.dtype != stored[first].dtype and name not in has_fixed_dtype:
            raise ValueError(
                f"{name}: wanted {stored[first].dtype} as in {first}, or dtype=..., got "
                f"{tensor.dtype} in {tensor.file}"
            )
    stored_dtype = stored[first].dtype
    assert stored_dtype is not None
    return stored_dtype


# MXFP4, the four-bit format of gpt-oss, read as bfloat16: blocks of 32 weights share a power of two. A weight
# `[E, in, out]` is stored as bytes `[E, out, in / 32, 16]`, with the first of two weights in the lower half of a byte,
# and as exponents `[E, out, in / 32]`. Source: OCP Microscaling Formats (MX), version 1.0, sections 5.2 and 6.3.
_BLOCKS, _SCALES = "_blocks", "_scales"
_BIAS, _NAN = 127, 255  # exponents: their bias, and the code of NaN
_BLOCK = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_POSITIVE, *(-x for x in _POSITIVE)], np.float32)


def unpacked(tensors: dict[str, safetensors.Tensor]) -> dict[str, safetensors.Tensor]:
    """Replaces each pair of blocks and scales by one bfloat16 tensor, which is unpacked when it is read."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith(_BLOCKS):
            whole = name.removesuffix(_BLOCKS)
            if whole in tensors:
                raise ValueError(
                    f"{whole}: wanted a weight or its {_BLOCKS} and {_SCALES}, got both, in {tensor.file}"
                )
            result[whole] = _weight(name, tensor, tensors.get(whole + _SCALES))
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors):
            result[name] = tensor
    return result


def _weight(
    name: str, blocks: safetensors.Tensor, scales: safetensors.Tensor | None
) -> safetensors.Tensor:
    if scales is None or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, _BLOCK // 2):
        scales_shape = None if scales is None else scales.shape
        raise ValueError(
            f"{name}: wanted {_BLOCK // 2} bytes for each of its scales in {blocks.file}, got "
            f"blocks {blocks.shape} and scales {scales_shape}"
        )
    if (blocks.code, scales.code) != ("U8", "U8"):
        raise ValueError(f"{name}: wanted U8 in {blocks.file}, got {blocks.code}, {scales.code}")
    experts, out, groups = scales.shape
    shape = experts, groups * _BLOCK, out
    stored = _Packed(name, blocks.stored, scales.stored)
    return safetensors.Tensor(blocks.file, stored, shape, jnp.dtype(jnp.bfloat16), "BF16")


class _Packed:
    """A packed weight `[E, in, out]` whose slices are unpacked one expert at a time."""

    def __init__(self, name: str, blocks: Any, scales: Any) -> None:
        self._name, self._blocks, self._scales = name, blocks, scales

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, inputs, outputs = index
        first, last = inputs.start // _BLOCK, -(-inputs.stop // _BLOCK)
        kept = slice(inputs.start - first * _BLOCK, inputs.stop - first * _BLOCK)
        shape = [part.stop - part.start for part in index]
        result = np.empty(shape, jnp.bfloat16)
        for row, expert in zip(result, range(experts.start, experts.stop), strict=True):
            place = slice(expert, expert + 1), outputs, slice(first, last)
            row[...] = self._expert(place)[:, kept].T
        return result

    def _expert(self, place: tuple[slice, ...]) -> np.ndarray:
        packed, scales = self._blocks[(*place, slice(None))][0], self._scales[place][0]
        if (scales == _NAN).any():
            raise ValueError(f"{self._name}: wanted finite scales, got NaN")
        halves = np.stack([packed & 15, packed >> 4], -1).reshape(*scales.shape, _BLOCK)
        exponents = scales.astype(np.int32)[..., None] - _BIAS
        return np.ldexp(_VALUES[halves], exponents).reshape(len(scales), -1)
