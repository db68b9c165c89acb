"""The families whose checkpoints can be read."""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from ._encoder import BERT
from .checkpoint._load import load as load_family
from .decoder._decoder import Family
from .llama._llama import LLAMA
from .llama._variants import VARIANTS

# By the `model_type` of their checkpoints.
FAMILIES: Mapping[str, Family] = MappingProxyType({**dict.fromkeys(VARIANTS, LLAMA), "bert": BERT})


def load(
    directory: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    tensor: str = "tensor",
    progress: bool | Callable[[float, str], Any] | None = None,
) -> Any:
    """Reads a checkpoint in Hugging Face's format, of the family that its `config.json` names.

    The folder has a `config.json` and one or more safetensors files. Everything is checked before the
    first weight is read, and nothing is unpickled. Each process reads the parts of a weight that its
    devices hold, once; the host holds one weight at a time. Rotary frequencies in old files are ignored,
    and so is a copy of the embedding as the output projection of tied embeddings. One that differs from
    the embedding is used, with a warning, although `tie_word_embeddings` is true; each process reads both
    to tell. If another process saves at the same time, each process reads the files of one save, which
    need not be the same for all.

    Args:
        directory: the folder; `"demo"`: that of the library's own model of bytes, if there is no other one.
        mesh: of the devices that get the weights, placed as by [`shard`][energy_attn.models.shard];
            None: the mesh in force, else the default device.
        dtype: of the weights; None: that of the files, which must all have the same. float64 becomes
            float32 unless JAX's 64-bit mode is on.
        tensor: the axis that weights are split over, if the mesh has it.
        progress: whether to show a bar on standard error, or a function called with the share
            done and a name; None: a bar if standard error is a terminal.

    Returns:
        The model. A [`Llama`][energy_attn.models.Llama], under the flags of its family, where `model_type` is
        `"llama"`, `"mistral"`, `"mixtral"`, `"qwen2"`, `"qwen3"`, `"qwen3_moe"`, `"smollm3"`, `"gemma2"`,
        `"gemma3_text"`, `"olmo2"`, `"phi3"`, `"gpt_oss"` or `"deepseek_v3"`; an
        [`Encoder`][energy_attn.models.Encoder] for `"bert"`.

    Raises:
        TypeError: an argument of another type.
        ValueError: a `model_type` that is none of those; as
            [`from_json`][energy_attn.models.LlamaConfig.from_json]; no weights, or only pickled ones; a file
            that is truncated, not safetensors, a pointer of Git LFS, outside the folder or of another `save`
            than the rest; files that are replaced again and again; more layers than the files have; tensors
            that are missing, unexpected, or of another shape or dtype; or a mesh that `shard` refuses.

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
