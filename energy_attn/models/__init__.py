"""Models whose attention is this library's free energy, differentiated."""

from .llama import Llama as Llama
from .llama import LlamaCache as LlamaCache
from .llama import LlamaConfig as LlamaConfig
