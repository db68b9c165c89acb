"""The sizes and constants of a Llama decoder, and the `config.json` that holds them."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from energy_attn.kernels.internal import (
    check_choice,
    check_finite_number,
    check_flag,
    check_integer,
    received,
)

from ..checkpoint._config import end_tokens, naming, read_json
from ..decoder._config import AbstractDecoderConfig
from ..families._variant import FULL, SLIDING
from ..families._variants import VARIANTS
from ._fields import check_fields
from ._scaling import AbstractRope, LinearRope, check_positive
from ._scaling_fields import read_scaling, rope_entries

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_key_value_heads",
    "max_position_embeddings",
)
_FLAGS = (
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "qk_norm"),
    *("qk_norm_over_heads", "unit_offset", "pre_norms", "post_norms", "scaled_embeddings"),
)
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Numbers above zero, or None.
_POSITIVE = (
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    "rope_local_base_freq",
)
# Attributes that every family has in its file, and fields that are read in addition.
_SHARED = (
    *_SIZES,
    *("num_attention_heads", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
)
_OTHERS = (
    *("model_type", "hidden_act", "hidden_activation", "quantization_config"),
    *("rope_scaling", "rope_parameters", "rope_local_base_freq"),
)
_PART = "partial_rotary_factor"


@dataclass(frozen=True)
class LlamaConfig(AbstractDecoderConfig):
    """The sizes and constants of a Llama, or of a decoder that is one under flags, under Hugging Face's names.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key/value heads, a divisor of the query heads; None for one
            each.
        head_dim: width of a head, even; None for `hidden_size / num_attention_heads`.
        rms_norm_eps: added to the mean square before its root.
        rope_theta: the rotary embedding's base.
        tie_word_embeddings: whether the output projection is the embedding.
        max_position_embeddings: the context that the model is meant for; no array has this size.
        attention_bias: whether the four projections around attention have biases.
        mlp_bias: whether the three projections of the MLP have biases.
        rope_scaling: how the rotary frequencies are lowered for longer contexts,
            [`LinearRope`][energy_attn.models.LinearRope],
            [`Llama3Rope`][energy_attn.models.Llama3Rope],
            [`YarnRope`][energy_attn.models.YarnRope] or None.
        eos_token_id: the tokens that end a text, where
            [`generate`][energy_attn.models.generate] stops by default.
        model_type: the family whose checkpoints are written: `"llama"`, `"mistral"`, `"qwen2"`, `"qwen3"`,
            `"smollm3"`, `"gemma2"`, `"gemma3_text"` or `"olmo2"`.
        hidden_act: the activation inside the MLP, `"silu"` or `"gelu_pytorch_tanh"`.
        output_bias: whether the projection behind attention has a bias; None for `attention_bias`.
        qk_norm: whether queries and keys are normed before they are turned: each head by itself.
        qk_norm_over_heads: whether it is all heads together instead.
        sliding_window: how many tokens a query sees, its own among them, in the layers that have a window; None for
            no window.
        layer_types: `"sliding_attention"` or `"full_attention"` for each layer; None for the first, where there is a
            window.
        no_rope_layers: for each layer 1 if it has a rotary embedding, and 0 if it has none; None for all.
        rope_local_base_freq: the base of the rotary embedding in layers with a window, unscaled; None for that of all.
        query_pre_attn_scalar: scores are divided by its root; None for `head_dim`.
        attn_logit_softcapping: the [cap][energy_attn.kernels.scores.SoftCap] of scores; None for none.
        final_logit_softcapping: that of logits; None for none.
        unit_offset: whether norms multiply by one more than their weights.
        pre_norms: whether what attention and the MLP read is normed.
        post_norms: whether what they add is.
        scaled_embeddings: whether embeddings are multiplied by the root of `hidden_size`.

    Raises:
        TypeError: a size is not an integer, a constant not a number, a flag not a bool, or a scaling,
            tokens or layers of another type.
        ValueError: a size is not positive, the key/value heads do not divide the query heads, the
            width of a head is odd, an unknown family, or layers of another number or kind.

    Examples:
        >>> from energy_attn.models import LlamaConfig
        >>> LlamaConfig(hidden_size=64, num_attention_heads=4).head_dim
        16
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    # None only as an argument: these are filled in
    num_key_value_heads: int = None  # pyright: ignore[reportAssignmentType]
    head_dim: int = None  # pyright: ignore[reportAssignmentType]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_scaling: AbstractRope | None = None
    eos_token_id: tuple[int, ...] = ()
    model_type: str = "llama"
    output_bias: bool | None = None
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None
    hidden_act: str = "silu"
    rope_local_base_freq: float | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    unit_offset: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    scaled_embeddings: bool = False

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        check_integer("num_attention_heads", heads, 1)
        self._fill("num_key_value_heads", heads if kv_heads is None else kv_heads)
        for name in _SIZES:
            check_integer(name, getattr(self, name), 1)
        if heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_key_value_heads: wanted a divisor of the {heads} heads, "
                f"got {self.num_key_value_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % heads != 0:
                raise ValueError(
                    f"hidden_size: wanted a multiple of the {heads} heads where head_dim is not "
                    f"given, got {self.hidden_size}"
                )
            self._fill("head_dim", self.hidden_size // heads)
        if check_integer("head_dim", self.head_dim, 2) % 2:
            raise ValueError(f"head_dim: wanted an even number, got {self.head_dim}")
        for name, least in (("rms_norm_eps", 0.0), ("rope_theta", 1.0)):
            if check_finite_number(name, getattr(self, name)) < least:
                raise ValueError(f"{name}: wanted at least {least}, got {getattr(self, name)}")
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        scaling = self.rope_scaling
        if not isinstance(scaling, AbstractRope | None):
            raise TypeError(
                f"rope_scaling: wanted a LinearRope, a Llama3Rope, a YarnRope or None, got {received(scaling)}"
            )
        if not isinstance(self.eos_token_id, tuple):  # hashable, as the configuration is static
            raise TypeError(f"eos_token_id: wanted a tuple, got {received(self.eos_token_id)}")
        for token in self.eos_token_id:
            check_integer("eos_token_id", token, 0)
        check_choice("model_type", self.model_type, tuple(VARIANTS))
        check_choice("hidden_act", self.hidden_act, _ACTIVATIONS)
        if not (self.pre_norms or self.post_norms):
            raise ValueError("post_norms: wanted True where pre_norms is False, got False")
        for name in _POSITIVE:
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if self.output_bias is not None:
            check_flag("output_bias", self.output_bias)
        if self.sliding_window is not None:
            check_integer("sliding_window", self.sliding_window, 1)
        self._check_layers("layer_types", (FULL, SLIDING))
        self._check_layers("no_rope_layers", (0, 1))
        if self.sliding_window is None and SLIDING in (self.layer_types or ()):
            raise ValueError(f"sliding_window: wanted a size for layers of {SLIDING!r}, got None")

    def _check_layers(self, name: str, kinds: tuple[Any, ...]) -> None:
        given, count = getattr(self, name), self.num_hidden_layers
        if given is None:
            return
        if not isinstance(given, tuple):
            raise TypeError(f"{name}: wanted a tuple or None, got {received(given)}")
        if len(given) != count or any(x not in kinds for x in given):
            wanted = " or ".join(map(repr, kinds))
            raise ValueError(f"{name}: wanted {wanted} for each of {count} layers, got {given}")

    def window(self, layer: int) -> int | None:
        """How many tokens a query of a layer sees, its own among them; None: all before it.

        Examples:
            >>> from energy_attn.models import LlamaConfig
            >>> LlamaConfig(sliding_window=4096, model_type="mistral").window(0)
            4096
        """
        kinds = self.layer_types
        return self.sliding_window if kinds is None or kinds[layer] == SLIDING else None

    def rotates(self, layer: int) -> bool:
        """Whether a layer has a rotary embedding.

        Examples:
            >>> from energy_attn.models import LlamaConfig
            >>> LlamaConfig().rotates(0)
            True
        """
        return self.no_rope_layers is None or bool(self.no_rope_layers[layer])

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> "LlamaConfig":
        """Reads the `config.json` of a checkpoint in the format of transformers 4 or 5.

        A missing field has its default in transformers. Fields other than the attributes above are ignored
        if they are null or known not to change the logits; all others are refused by name.

        Args:
            path: the file.

        Raises:
            TypeError: `path` is not a path, or a value is of another type.
            ValueError: no file, no JSON, an unknown family, another activation than its own, quantized weights, a
                rotary embedding of part of a head or of an unknown scaling, a field that the family does not
                have, such as `sliding_window` of a Llama, or as the class does. `dynamic`
                is refused because its frequencies depend on the length of the whole text: they would
                change for keys that are already in a cache.

        Examples:
            >>> import json, pathlib, tempfile
            >>> from energy_attn.models import LlamaConfig
            >>> rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            ...         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            >>> entries = {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": rope}
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     path = pathlib.Path(folder, "config.json")
            ...     _ = path.write_text(json.dumps(entries))
            ...     config = LlamaConfig.from_json(path)
            >>> config.rope_theta, config.rope_scaling.factor
            (500000.0, 8.0)
        """
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path: wanted the path of a config.json, got {received(path)}")
        entries = read_json(path, "config.json")
        with naming(path):
            return read_config(entries)

    def to_json(self) -> dict[str, Any]:
        """The fields of a `config.json` that both transformers 4 and 5 read.

        Raises:
            ValueError: the family of `model_type` has no field for something that this decoder has.

        Examples:
            >>> from energy_attn.models import LlamaConfig
            >>> LlamaConfig(rope_theta=5e5).to_json()["rope_parameters"]
            {'rope_type': 'default', 'rope_theta': 500000.0}
        """
        variant = VARIANTS[self.model_type]
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        entries = {
            "architectures": [variant.architecture],
            "model_type": self.model_type,
            "hidden_act": self.hidden_act,
            "rope_scaling": None,
        }
        entries |= {name: values[name] for name in _SHARED} | variant.write(values)
        scaling = self.rope_scaling
        if scaling is not None:
            entries["rope_scaling"] = rope_entries(scaling)
        default = entries["rope_scaling"] or {"rope_type": "default"}
        entries["rope_parameters"] = {**default, "rope_theta": self.rope_theta}
        if variant.activation != "silu":
            entries["hidden_activation"] = self.hidden_act
        local = self.rope_local_base_freq
        if local is not None:
            entries["rope_local_base_freq"] = local
            entries["rope_parameters"] = {
                FULL: entries["rope_parameters"],
                SLIDING: {"rope_type": "default", "rope_theta": local},
            }
        # null, as transformers has default tokens for missing fields
        end_tokens = list(self.eos_token_id) or None
        entries |= {"bos_token_id": None, "pad_token_id": None, "eos_token_id": end_tokens}
        own, read = self._computed(), read_config(entries)._computed()
        if lost := [name for name, x in own.items() if read[name] != x]:
            raise ValueError(
                f"{lost[0]}: wanted what a checkpoint of {self.model_type!r} can say, got {own[lost[0]]}"
            )
        return entries

    def _computed(self) -> dict[str, Any]:
        """What the decoder computes by, of which some may be said in several ways."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        layers = range(self.num_hidden_layers)
        del values["layer_types"]
        return values | {
            "sliding_window": [self.window(i) for i in layers],
            "no_rope_layers": [int(self.rotates(i)) for i in layers],
            "output_bias": self.attention_bias if self.output_bias is None else self.output_bias,
        }

    @property
    def context_length(self) -> int:
        """The number of positions that the model is meant for, with a linear scaling applied.

        Examples:
            >>> from energy_attn.models import LinearRope, LlamaConfig
            >>> LlamaConfig(rope_scaling=LinearRope(factor=4.0)).context_length
            8192
        """
        if isinstance(self.rope_scaling, LinearRope):
            # by convention, max_position_embeddings is then the length before scaling
            return int(self.max_position_embeddings * self.rope_scaling.factor)
        return self.max_position_embeddings

    def _fill(self, name: str, value: int) -> None:
        object.__setattr__(self, name, value)


def read_config(entries: Mapping[str, Any]) -> LlamaConfig:
    """The configuration that the fields of a `config.json` describe; raises as `from_json`."""
    kind = entries.get("model_type")
    if not isinstance(kind, str) or kind not in VARIANTS:
        raise ValueError(
            f"model_type: wanted {' or '.join(map(repr, VARIANTS))}, got {received(kind)}"
        )
    variant = VARIANTS[kind]
    for name in ("hidden_act", "hidden_activation"):
        if entries.get(name, variant.activation) != variant.activation:
            raise ValueError(
                f"{name}: wanted {variant.activation!r}, got {received(entries[name])}"
            )
    if entries.get("quantization_config") is not None:
        raise ValueError("quantization_config: wanted weights that are not quantized, got one")
    # transformers 5 has one object for both; 4 has the base apart
    rope = entries.get("rope_scaling") or entries.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_scaling: wanted a JSON object, got {received(rope)}")
    local = entries.get("rope_local_base_freq", variant.local_theta)
    if variant.local_theta is not None and {SLIDING, FULL} & set(
        rope
    ):  # one for each kind of layers
        parts = {"rope_type": "default", **rope.get(SLIDING, {})}
        if parts["rope_type"] != "default":
            raise ValueError(
                f"rope_type: wanted 'default' in {SLIDING!r}, got {parts['rope_type']!r}"
            )
        local, rope = parts.get("rope_theta", local), rope.get(FULL, {})
    part = rope.get(_PART, entries.get(_PART))
    if part not in (None, 1):
        raise ValueError(f"{_PART}: wanted 1, got {received(part)}")
    check_fields(entries, {*_SHARED, *_OTHERS, _PART, "eos_token_id", *variant.fields})
    fields = {**variant.defaults, **{x: entries[x] for x in _SHARED if x in entries}}
    if "rope_theta" in rope:
        fields["rope_theta"] = rope["rope_theta"]
    fields["eos_token_id"] = end_tokens(entries)
    context = fields.get("max_position_embeddings", LlamaConfig.max_position_embeddings)
    sizes = {"num_hidden_layers": LlamaConfig.num_hidden_layers, **fields}
    own = variant.read({**{x: entries[x] for x in variant.fields if x in entries}, **sizes})
    fields |= {"model_type": kind, "hidden_act": variant.activation, **variant.fixed, **own}
    if variant.local_theta is not None:
        fields["rope_local_base_freq"] = local
    return LlamaConfig(**fields, rope_scaling=read_scaling(rope, context))
