"""Writes a model atomically into a folder, as Hugging Face's `config.json` and safetensors files."""

import contextlib
import itertools
import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.core
import numpy as np
from jaxtyping import Array

from energy_attn.distributed import fetch
from energy_attn.distributed.internal import files, safetensors
from energy_attn.kernels.internal import checks

from ..decoder._config import AbstractModel, StoredWeight
from ._config import CONFIG, INDEX, SAVE, WHOLE, checked, in_use, unfinished
from ._load import named

# Files that `save` writes, and unfinished files of older saves.
_OURS = re.compile(
    rf"model-{files.IDENTITY}-\d{{5}}-of-\d{{5}}\.safetensors"
    rf"|(model(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?|config\.json)"
    rf"(\.{files.IDENTITY})?\.unfinished"
)
# Files of transformers, removed as a reader would prefer them.
_THEIRS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def save(model: AbstractModel, directory: object, max_shard_size: int) -> None:
    folder = checked(directory)
    checks.check_integer("max_shard_size", max_shard_size, 1, is_wide=True)
    leaves = named(model)
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
            raise TypeError(f"{name}: wanted a concrete array, got {checks.received(leaf)}")
    tensors: dict[str, _Written] = {}
    for name, leaf in leaves.items():
        place = model.config.stored(name, leaf.shape)
        for index, tensor in enumerate(place.names):
            new = _Written(place.shape(leaf.shape), leaf.dtype, [])
            weights = tensors.setdefault(tensor, new).weights
            weights.append((place, leaf, index if place.is_split else None))
    first = jax.process_index() == 0
    with files.saving(folder, _OURS, in_use) as identity:
        metadata = {"format": "pt", SAVE: identity}
        parts = _files(tensors, max_shard_size, identity)
        arrays = map(_whole, tensors.values())
        with files.together(folder):
            try:
                if first:
                    for file, group in parts.items():
                        target = unfinished(file, identity) if file == WHOLE else file
                        shapes = {name: (x.shape, x.dtype) for name, x in group.items()}
                        group_arrays = itertools.islice(arrays, len(group))
                        safetensors.write(folder / target, metadata, shapes, group_arrays)
                    _write_texts(folder, model, parts, identity)
            finally:
                # every process takes part in gathering every weight
                for _ in arrays if jax.process_count() > 1 else ():
                    pass
        with files.together(folder):
            if first:
                _replace_weights(folder, WHOLE if WHOLE in parts else INDEX, identity)
                files.clean(folder, _THEIRS, in_use)


class _Written(NamedTuple):
    """One stored tensor, and the weights packed in it: their places, arrays, and indices along axis 0, or None."""

    shape: tuple[int, ...]
    dtype: np.dtype
    weights: list[tuple[StoredWeight, Array, int | None]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _files(
    tensors: dict[str, _Written], most: int, identity: str
) -> dict[str, dict[str, _Written]]:
    """Groups tensors by file: at most `most` bytes per file, unless a single tensor has more."""
    groups: list[dict[str, _Written]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > most and groups[-1]:
            groups.append({})
            size = tensor.nbytes
        groups[-1][name] = tensor
    if len(groups) == 1:
        return {WHOLE: groups[0]}
    ending = f"of-{len(groups):05d}.safetensors"
    return {f"model-{identity}-{i:05d}-{ending}": group for i, group in enumerate(groups, 1)}


def _write_texts(
    folder: Path, model: AbstractModel, parts: dict[str, dict[str, _Written]], identity: str
) -> None:
    """Writes the configuration, and the index of several files, under their unfinished names."""
    file_of = {name: file for file, group in parts.items() for name in group}
    tensors = [tensor for group in parts.values() for tensor in group.values()]
    entries = {**model.config.to_json(), "torch_dtype": tensors[0].dtype.name, SAVE: identity}
    texts: dict[str, Any] = {CONFIG: entries}
    if len(parts) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        texts[INDEX] = {"metadata": {"total_size": total, SAVE: identity}, "weight_map": file_of}
    for name, text in texts.items():
        files.write(
            folder / unfinished(name, identity), [(json.dumps(text, indent=2) + "\n").encode()]
        )


def _replace_weights(folder: Path, weights: str, identity: str) -> None:
    # readers prefer the single file: an index has no effect while it exists
    single = folder / WHOLE
    hidden = weights == INDEX and os.path.lexists(single)
    try:
        files.replace(folder / unfinished(weights, identity), folder / weights)
        if hidden:
            files.remove(single)
    except OSError:
        if hidden and os.path.lexists(single):
            with contextlib.suppress(OSError):
                files.remove(folder / weights)
        raise
    files.replace(folder / unfinished(CONFIG, identity), folder / CONFIG)


def _whole(tensor: _Written) -> np.ndarray:
    out = np.empty(tensor.shape, tensor.dtype)
    for place, leaf, index in tensor.weights:
        part = leaf if index is None else leaf[index]
        # through a new array: a JAX array caches its copy on the host
        shards = [shard.data for shard in part.addressable_shards]
        data = fetch(jax.make_array_from_single_device_arrays(part.shape, part.sharding, shards))
        if place.axis is None and not place.swapped:
            return data
        place.within(out, leaf.shape)[...] = data
    return out
