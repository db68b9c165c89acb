"""Models whose attention is this library's free energy, differentiated.

Examples:
    >>> import jax
    >>> import energy_attn as ea
    >>> config = ea.models.LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = ea.models.Llama(config, key=jax.random.key(0))
    >>> model(jax.numpy.zeros((1, 4), int)).logits.shape
    (1, 4, 16)
"""

from ._encoder import Encoder as Encoder
from ._encoder import EncoderConfig as EncoderConfig
from ._families import load as load
from ._tokenizer import Tokenizer as Tokenizer
from .checkpoint._shard import shard as shard
from .decoder._cache import DecoderCache as DecoderCache
from .decoder._decoder import AbstractDecoder as AbstractDecoder
from .decoder._images import Images as Images
from .generation._drafters import AbstractDrafter as AbstractDrafter
from .generation._drafters import ModelDrafter as ModelDrafter
from .generation._drafters import PromptLookup as PromptLookup
from .generation._generate import generate as generate
from .generation._prompts import score_continuations as score_continuations
from .llama._config import LlamaConfig as LlamaConfig
from .llama._llama import Llama as Llama
from .llama._rope import Rope as Rope
from .llama._variant import ExpertsConfig as ExpertsConfig
from .llama._variant import LatentConfig as LatentConfig
