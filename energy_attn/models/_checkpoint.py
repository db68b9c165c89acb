"""A Llama in a folder: Hugging Face's `config.json` and safetensors files, read and written."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array

from .._progress import Progress, progress_of
from ..distributed import fetch
from ..kernels._errors import check_floating_dtype, check_integer, received
from . import _safetensors
from ._config import LlamaConfig, with_ends
from ._safetensors import Part, Tensor
from ._shard import shardings

_CONFIG, _WHOLE, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# What `save` may have written: a reader would prefer an old file of one of these names.
_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_PICKLES = ("*.bin", "*.pt", "*.pth")
_UNFINISHED = ".unfinished"
_SHOWN = 3  # names in an error


def load(
    directory: Any,
    build: Callable[[LlamaConfig], Any],
    *,
    mesh: Any,
    dtype: Any,
    tensor: Any,
    progress: bool | Progress | None,
) -> Any:
    """The model that `build` gives with abstract weights, with those of a folder.

    Everything is checked before a weight is read. Raises as `Llama.load`.
    """
    folder = _folder(directory)
    if not folder.is_dir():
        raise ValueError(f"directory: wanted a folder, got {folder}, which is none")
    if dtype is not None:
        dtype = check_floating_dtype("dtype", dtype)
    config = with_ends(LlamaConfig.from_json(_inside(folder, _CONFIG)), folder)
    model = build(config)
    names, leaves = named(model)
    stored = _matching(_stored(folder), names, leaves, config, dtype)
    dtype = jax.dtypes.canonicalize_dtype(stored[0].dtype if dtype is None else dtype)
    if mesh is None:
        in_force = jax.sharding.get_mesh()
        mesh = None if in_force.empty else in_force
    places = [None] * len(leaves) if mesh is None else shardings(model, mesh, tensor)
    total, done, arrays = sum(leaf.size for leaf in leaves), 0, []
    with progress_of(f"reading {folder.name}", progress) as show:
        for name, one, place in zip(names, stored, places, strict=True):
            # one at a time: else the host has what is still on its way to the devices
            arrays.append(jax.block_until_ready(_array(one, place, dtype)))
            done += arrays[-1].size
            show(done / total, name)
    return jax.tree.unflatten(jax.tree.structure(model), arrays)


def _array(tensor: Tensor, place: Any, dtype: np.dtype) -> Array:
    """A tensor on its devices, of which this process reads what its own have."""
    if place is None:
        whole = tuple((0, size) for size in tensor.shape)
        return jax.device_put(_safetensors.read(tensor, [whole], dtype)[whole])
    indices = place.addressable_devices_indices_map(tensor.shape).values()
    parts = {_part(index, tensor.shape) for index in indices}
    found = _safetensors.read(tensor, parts, dtype)
    return jax.make_array_from_callback(
        tensor.shape, place, lambda index: found[_part(index, tensor.shape)]
    )


def _part(index: Any, shape: tuple[int, ...]) -> Part:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def named(model: Any) -> tuple[list[str], list[Any]]:
    """The names that a checkpoint has for the weights of a Llama, and the weights. Raises nothing."""
    names, leaves = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(model):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names.append(name if name.startswith("lm_head.") else f"model.{name}")
        leaves.append(leaf)
    return names, leaves


def _folder(directory: Any) -> Path:
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(f"directory: wanted the path of a folder, got {received(directory)}")
    return Path(os.fsdecode(directory))


def _inside(folder: Path, name: str) -> Path:
    """A file of the folder; `ValueError` for a name or a link that leads out of it."""
    root = folder.resolve()
    homes = [root]
    if root.parent.name == "snapshots":  # Hugging Face's cache: links to the blobs beside
        homes.append(root.parent.parent / "blobs")
    file = folder / name
    if not any(file.resolve().is_relative_to(home) for home in homes):
        raise ValueError(f"directory: wanted files inside {folder}, got {name!r}, which is not")
    return file


def _stored(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder by name; raises `ValueError` where they cannot be found."""
    if (whole := _inside(folder, _WHOLE)).exists():
        return _safetensors.tensors(whole)
    if not (index := _inside(folder, _INDEX)).exists():
        if pickles := [file.name for kind in _PICKLES for file in folder.glob(kind)]:
            raise ValueError(
                f"directory: wanted {_WHOLE} or {_INDEX}, got {pickles[0]}: only safetensors is "
                "read, as nothing is unpickled; write it anew with save_pretrained of transformers"
            )
        raise ValueError(f"directory: wanted {_WHOLE} or {_INDEX} in it, got {folder}")
    try:
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(name, str) for name in where.values()):
            raise ValueError("file names that are no strings")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{index}: wanted the weight_map of a checkpoint, got {error!r}"
        ) from error
    files = {name: _safetensors.tensors(_inside(folder, name)) for name in set(where.values())}
    for name, file in where.items():
        if name not in files[file]:
            raise ValueError(f"{name}: wanted it in {folder / file}, as {_INDEX} says, got none")
    return {name: files[file][name] for name, file in where.items()}


def _matching(
    stored: Mapping[str, Tensor],
    names: list[str],
    leaves: list[Any],
    config: LlamaConfig,
    dtype: np.dtype | None,
) -> list[Tensor]:
    """The tensors of these names, all checked; raises `ValueError` naming one that is not right."""
    unexpected = [name for name in stored if name not in names and not _ignored(name, config)]
    missing = [name for name in names if name not in stored]
    for what, found in (("all tensors of the model", missing), ("no other tensors", unexpected)):
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            which = "without" if found is missing else "with"
            raise ValueError(
                f"directory: wanted {what}, got it {which} {', '.join(found[:_SHOWN])}{more}"
            )
    first = stored[names[0]]
    for name, leaf in zip(names, leaves, strict=True):
        tensor = stored[name]
        if tensor.dtype is None:
            raise ValueError(
                f"{name}: wanted float16, bfloat16, float32 or float64 in {tensor.file}, "
                f"got {tensor.code}"
            )
        if tensor.shape != leaf.shape:
            raise ValueError(
                f"{name}: wanted shape {leaf.shape} by {_CONFIG}, got {tensor.shape} in "
                f"{tensor.file}"
            )
        if dtype is None and tensor.dtype != first.dtype:
            raise ValueError(
                f"{name}: wanted {first.dtype} as in {names[0]}, or dtype=..., got {tensor.dtype}"
            )
    return [stored[name] for name in names]


def _ignored(name: str, config: LlamaConfig) -> bool:
    """Whether Hugging Face reads past it: old files have frequencies, tied ones a head."""
    return name.endswith(".rotary_emb.inv_freq") or (
        config.tie_word_embeddings and name == "lm_head.weight"
    )


def save(model: Any, directory: Any, max_shard_size: int) -> None:
    """Writes a model into a folder, files of at most that many bytes; raises as `Llama.save`."""
    folder = _folder(directory)
    check_integer("max_shard_size", max_shard_size, 1)
    names, leaves = named(model)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
            raise TypeError(f"{name}: wanted an array that has been computed, got {received(leaf)}")
    groups: list[dict[str, Array]] = [{}]
    size = 0
    for name, leaf in zip(names, leaves, strict=True):
        size += leaf.nbytes
        if size > max_shard_size and groups[-1]:
            groups.append({})
            size = leaf.nbytes
        groups[-1][name] = leaf
    count = len(groups)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = files if count > 1 else [_WHOLE]
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    for file, group in zip(files, groups, strict=True):
        arrays = map(_host, group.values())
        if jax.process_index() == 0:
            about = {name: (leaf.shape, leaf.dtype) for name, leaf in group.items()}
            _safetensors.write(folder / f"{file}{_UNFINISHED}", about, arrays)
        else:
            for _ in arrays:  # its part in bringing each of them together
                pass
    if jax.process_index() == 0:
        texts = {_CONFIG: {**model.config.to_json(), "torch_dtype": leaves[0].dtype.name}}
        if count > 1:
            total = {"total_size": sum(leaf.nbytes for leaf in leaves)}
            where = {
                name: file for file, group in zip(files, groups, strict=True) for name in group
            }
            texts[_INDEX] = {"metadata": total, "weight_map": where}
        for file, said in texts.items():
            (folder / f"{file}{_UNFINISHED}").write_text(json.dumps(said, indent=2) + "\n")
        # all are whole before the first takes its place
        for file in (*files, *texts):
            (folder / f"{file}{_UNFINISHED}").replace(folder / file)
        for old in [file for file in folder.iterdir() if _OURS.fullmatch(file.name)]:
            if old.name not in (*files, *texts):
                old.unlink()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder.name}")


def _host(leaf: Array) -> np.ndarray:
    """A weight on the host, from all devices that have a part of it. Raises nothing."""
    # in an array of its own, as an array keeps the copy that it was once asked for
    parts = [shard.data for shard in leaf.addressable_shards]
    return fetch(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts))
