"""The table of model families, and `load`, which reads a checkpoint of any of them."""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from ._encoder import BERT
from .checkpoint._load import load as load_family
from .decoder._decoder import Family
from .llama._llama import GEMMA3, LLAMA
from .llama._variants import VARIANTS

# By `model_type`.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {**dict.fromkeys(VARIANTS, LLAMA), "gemma3": GEMMA3, "bert": BERT}
)


def load(
    directory: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    tensor: str = "tensor",
    progress: bool | Callable[[float, str], Any] | None = None,
) -> Any:
    """Reads a checkpoint in Hugging Face's format, of any family that is supported.

    The folder has a `config.json` and one or more safetensors files. Everything is checked before the
    first weight is read, and nothing is unpickled. Each process reads once the parts of a weight that its
    devices hold; the host holds one weight at a time. Rotary frequencies in old files are ignored.
    With `tie_word_embeddings`, an output projection in the files that equals the embedding is ignored; another one
    is used, with a warning. If another process saves at the same time, each process reads the files of one save,
    but two processes may read different saves.

    Args:
        directory: the folder; `"demo"`: the library's own byte-level model, unless there is a file or folder `demo`.
        mesh: the devices that get the weights, placed as by [`shard`][energy_attn.models.shard];
            None: the current mesh, else the default device.
        dtype: the dtype of the weights; None: the dtype in the files, which must be one. float64 becomes
            float32 unless JAX's 64-bit mode is on.
        tensor: the axis that weights are split over, if the mesh has it.
        progress: whether to show a bar on standard error, or a function called with the fraction
            done and the name of a weight; None: a bar if standard error is a terminal.

    Returns:
        The model: a [`Llama`][energy_attn.models.Llama] with the flags of its family, for the `model_type`s
        `"llama"`, `"mistral"`, `"mixtral"`, `"qwen2"`, `"qwen3"`, `"qwen3_moe"`, `"smollm3"`, `"gemma2"`,
        `"gemma3_text"`, `"olmo2"`, `"phi3"`, `"gpt_oss"` or `"deepseek_v3"`, or of the text
        model of `"gemma3"`, whose [`Images`][energy_attn.models.Images] a call takes and whose vision tower is not
        read; an [`Encoder`][energy_attn.models.Encoder] for `"bert"`.

    Raises:
        TypeError: an argument of another type.
        ValueError: another `model_type`; a configuration that
            [`from_json`][energy_attn.models.LlamaConfig.from_json] refuses; no weights, or only pickled ones; a
            file that is truncated, not safetensors, a pointer of Git LFS, outside the folder or written by another
            `save`; files that other processes keep replacing; too few layers; tensors that are missing,
            unexpected, or of another shape or dtype; or a mesh that `shard` refuses.

    Examples:
        >>> import jax, tempfile
        >>> from energy_attn import models
        >>> config = models.LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     models.Llama(config, key=jax.random.key(0)).save(folder)
        ...     model = models.load(folder)
        >>> type(model).__name__
        'Llama'
    """
    options = {"mesh": mesh, "dtype": dtype, "tensor": tensor, "progress": progress}
    return load_family(directory, FAMILIES, **options)
