"""Models whose attention is this library's free energy, differentiated."""

from ._cache import LlamaCache as LlamaCache
from ._cache import TreeOutput as TreeOutput
from ._config import LlamaConfig as LlamaConfig
from ._drafters import AbstractDrafter as AbstractDrafter
from ._drafters import ModelDrafter as ModelDrafter
from ._drafters import PromptLookup as PromptLookup
from ._generate import Generation as Generation
from ._generate import generate as generate
from ._llama import Llama as Llama
from ._output import LlamaOutput as LlamaOutput
from ._rope import LinearRope as LinearRope
from ._rope import Llama3Rope as Llama3Rope
from ._score import score_continuations as score_continuations
from ._weights import shard as shard
