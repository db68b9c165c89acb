"""The families that are a Llama under flags, by the `model_type` of their checkpoints."""

from collections.abc import Mapping
from types import MappingProxyType

from ._deepseek import DEEPSEEK_V3
from ._gemma import GEMMA2, GEMMA3
from ._gpt_oss import GPT_OSS
from ._llama import LLAMA
from ._mistral import MISTRAL
from ._mixtral import MIXTRAL
from ._olmo import OLMO2
from ._phi3 import PHI3
from ._qwen import QWEN2, QWEN3, QWEN3_MOE
from ._smollm3 import SMOLLM3
from ._variant import Variant

VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "llama": LLAMA,
        "mistral": MISTRAL,
        "qwen2": QWEN2,
        "qwen3": QWEN3,
        "qwen3_moe": QWEN3_MOE,
        "smollm3": SMOLLM3,
        "gemma2": GEMMA2,
        "gemma3_text": GEMMA3,
        "olmo2": OLMO2,
        "phi3": PHI3,
        "mixtral": MIXTRAL,
        "gpt_oss": GPT_OSS,
        "deepseek_v3": DEEPSEEK_V3,
    }
)
