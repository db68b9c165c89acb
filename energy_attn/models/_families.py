"""The families whose checkpoints can be read."""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from .checkpoint._load import load as load_family
from .decoder._decoder import Family
from .encoder._encoder import BERT
from .families._mixtures import VARIANTS
from .llama._llama import LLAMA

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

    Files are read as by [`Llama.load`][energy_attn.models.Llama.load].

    Args:
        directory: the folder; `"demo"`: that of the library's own model of bytes, if there is no other one.
        mesh: of the devices that get the weights, placed as by [`shard`][energy_attn.models.shard];
            None: the mesh in force, else the default device.
        dtype: of the weights; None: that of the files.
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
        ValueError: a `model_type` that is none of those; or as `Llama.load`.

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
