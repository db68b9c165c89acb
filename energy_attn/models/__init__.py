"""Models whose attention is this library's free energy, differentiated.

Examples:
    >>> import jax
    >>> import energy_attn as ea
    >>> config = ea.models.LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
    >>> model = ea.models.Llama(config, key=jax.random.key(0))
    >>> model(jax.numpy.zeros((1, 4), int)).logits.shape
    (1, 4, 16)
"""

from ._families import load as load
from .checkpoint._shard import shard as shard
from .decoder._cache import DecoderCache as DecoderCache
from .decoder._cache import DecoderOutput as DecoderOutput
from .decoder._cache import TreeOutput as TreeOutput
from .decoder._decoder import AbstractDecoder as AbstractDecoder
from .encoder._encoder import Encoder as Encoder
from .encoder._encoder import EncoderConfig as EncoderConfig
from .encoder._encoder import EncoderOutput as EncoderOutput
from .families._variant import ExpertsConfig as ExpertsConfig
from .families._variant import LatentConfig as LatentConfig
from .generation._drafters import AbstractDrafter as AbstractDrafter
from .generation._drafters import ModelDrafter as ModelDrafter
from .generation._drafters import PromptLookup as PromptLookup
from .generation._generate import Generation as Generation
from .generation._generate import generate as generate
from .generation._prompts import score_continuations as score_continuations
from .llama._config import LlamaConfig as LlamaConfig
from .llama._llama import Llama as Llama
from .llama._rope import AbstractRope as AbstractRope
from .llama._rope import DynamicRope as DynamicRope
from .llama._rope import LinearRope as LinearRope
from .llama._rope import Llama3Rope as Llama3Rope
from .llama._rope import LongRope as LongRope
from .llama._rope import YarnRope as YarnRope
from .text._tokenizer import Tokenizer as Tokenizer
from .text._vocabulary import TextStream as TextStream
