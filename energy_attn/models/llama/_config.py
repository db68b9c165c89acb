"""The sizes and constants of a Llama decoder, and the `config.json` that holds them."""

import functools
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from energy_attn.kernels.internal import checks

from ..checkpoint._config import naming, read_json
from ..decoder._config import (
    AbstractDecoderConfig,
    StoredWeight,
    check_numbers,
    check_that,
    check_type,
)
from ._json import read_fields, write_fields
from ._rope import DynamicRope, LinearRope, Rope
from ._variant import FULL, SLIDING, ExpertsConfig, LatentConfig
from ._variants import VARIANTS

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
# Numbers above zero, or None.
_POSITIVE = (
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    "rope_local_base_freq",
)


@dataclass(frozen=True)
class LlamaConfig(AbstractDecoderConfig):
    """The sizes and constants of a Llama, or of a decoder that is one under flags, under Hugging Face's names.

    Attributes:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key/value heads, a divisor of the query heads; None for as many.
        head_dim: width of a head, even; None for `hidden_size / num_attention_heads`.
        rms_norm_eps: added to the mean square before its root.
        rope_theta: the rotary embedding's base.
        tie_word_embeddings: whether the output projection is the embedding.
        max_position_embeddings: the context that the model is meant for; no array has this size.
        attention_bias: whether the four projections around attention have biases.
        mlp_bias: whether the three projections of the MLP have biases.
        rope_scaling: the [scaling][energy_attn.models.Rope] of the rotary frequencies for longer contexts, or None.
        eos_token_id: the tokens that end a text, where
            [`generate`][energy_attn.models.generate] stops by default.
        model_type: the family whose checkpoints are written, one of those that
            [`load`][energy_attn.models.load] names.
        hidden_act: the activation inside the MLP, `"silu"` or `"gelu_pytorch_tanh"`.
        output_bias: whether the projection behind attention has a bias; None for `attention_bias`.
        qk_norm: whether queries and keys are normed, each head by itself, before the rotary embedding.
        qk_norm_over_heads: whether `qk_norm` norms all heads together instead.
        sliding_window: how many tokens a query sees, itself included, in layers with a window; None for no window.
        layer_types: `"sliding_attention"` or `"full_attention"` for each layer; None: all have the window, if any.
        no_rope_layers: for each layer 1 if it has a rotary embedding, else 0; None: all have one.
        rope_local_base_freq: the base of the rotary embedding in layers with a window, unscaled; None: as in others.
        query_pre_attn_scalar: scores are divided by its square root; None for `head_dim`.
        attn_logit_softcapping: the [cap][energy_attn.kernels.scores.SoftCap] of scores, or None.
        final_logit_softcapping: the cap of logits, or None.
        unit_offset: whether norms multiply by one plus their weights.
        wide_norms: whether norms of 16 bits multiply by their weights before rounding.
        pre_norms: whether the inputs of attention and of the MLP are normed.
        post_norms: whether their outputs are normed.
        scaled_embeddings: whether embeddings are multiplied by the square root of `hidden_size`.
        partial_rotary_factor: the part of a head, in front, that the rotary embedding rotates.
        attention_sinks: whether each head has a weight that is the `sink` of [`attention`][energy_attn.attention].
        experts: the [routed MLP][energy_attn.models.ExpertsConfig] of layers; None for a dense one in all.
        latent: [multi-head latent attention][energy_attn.models.LatentConfig], which sets the widths of heads; None
            for separate projections of queries, keys and values.

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
    rope_scaling: Rope | None = None
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
    wide_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    scaled_embeddings: bool = False
    partial_rotary_factor: float = 1.0
    attention_sinks: bool = False
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        checks.check_integer("num_attention_heads", heads, 1)
        fill = functools.partial(object.__setattr__, self)
        fill("num_key_value_heads", heads if kv_heads is None else kv_heads)
        check_numbers(self, _POSITIVE, {"head_dim": 2})
        fits = heads % self.num_key_value_heads == 0
        check_that(self, "num_key_value_heads", fits, f"a divisor of the {heads} heads")
        if self.latent is not None:
            self._check_latent(self.latent)
            fill("head_dim", self.latent.head_dim)
        if self.head_dim is None:
            wanted = f"a multiple of the {heads} heads where head_dim is not given"
            check_that(self, "hidden_size", self.hidden_size % heads == 0, wanted)
            fill("head_dim", self.hidden_size // heads)
        is_even = checks.check_integer("head_dim", self.head_dim, 2) % 2 == 0
        check_that(self, "head_dim", is_even, "an even number")
        check_that(self, "rms_norm_eps", self.rms_norm_eps >= 0, "at least 0.0")
        check_that(self, "rope_theta", self.rope_theta >= 1, "at least 1.0")
        check_type("rope_scaling", self.rope_scaling, Rope | None, "a Rope or None")
        name, part = "partial_rotary_factor", self.partial_rotary_factor
        wanted = "1 beside latent attention" if self.latent else "more than 0 and at most 1"
        check_that(self, name, part == 1 if self.latent else 0 < part <= 1, wanted)
        is_even = self.rotary_dim >= 2 and self.rotary_dim % 2 == 0
        check_that(self, name, is_even, f"an even part of a head of {self.head_dim}")
        check_type("experts", self.experts, ExpertsConfig | None, "an ExpertsConfig or None")
        # hashable, as the configuration is static
        check_type("eos_token_id", self.eos_token_id, tuple, "a tuple")
        for token in self.eos_token_id:
            checks.check_integer("eos_token_id", token, 0)
        checks.check_choice("model_type", self.model_type, tuple(VARIANTS))
        checks.check_choice("hidden_act", self.hidden_act, _ACTIVATIONS)
        has_norms = self.pre_norms or self.post_norms
        check_that(self, "post_norms", has_norms, "True where pre_norms is False")
        self._check_layers("layer_types", (FULL, SLIDING))
        self._check_layers("no_rope_layers", (0, 1))
        has_size = self.sliding_window is not None or SLIDING not in (self.layer_types or ())
        check_that(self, "sliding_window", has_size, f"a size for layers of {SLIDING!r}")

    def _check_latent(self, latent: Any) -> None:
        check_type("latent", latent, LatentConfig, "a LatentConfig or None")
        wanted: dict[str, tuple[Any, ...]] = {
            "num_key_value_heads": (self.num_attention_heads,),
            "head_dim": (None, latent.head_dim),
            "qk_norm": (False,),
            "attention_sinks": (False,),
        }
        for name, allowed in wanted.items():
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(
                    f"{name}: wanted {allowed[-1]} beside latent attention, got {checks.received(given)}"
                )

    def _check_layers(self, name: str, kinds: tuple[Any, ...]) -> None:
        given, count = getattr(self, name), self.num_hidden_layers
        check_type(name, given, tuple | None, "a tuple or None")
        if given is not None and (len(given) != count or any(x not in kinds for x in given)):
            wanted = " or ".join(map(repr, kinds))
            raise ValueError(f"{name}: wanted {wanted} for each of {count} layers, got {given}")

    def window(self, layer: int) -> int | None:
        """How many tokens a query of a layer sees, itself included; None: all before it.

        Examples:
            >>> from energy_attn.models import LlamaConfig
            >>> LlamaConfig(sliding_window=4096, model_type="mistral").window(0)
            4096
        """
        kinds = self.layer_types
        return self.sliding_window if kinds is None or kinds[layer] == SLIDING else None

    def rotates(self, layer: int) -> bool:
        """Whether a layer has a rotary embedding."""
        return self.no_rope_layers is None or bool(self.no_rope_layers[layer])

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head the rotary embedding rotates.

        Examples:
            >>> from energy_attn.models import LlamaConfig
            >>> LlamaConfig(head_dim=128, partial_rotary_factor=0.75).rotary_dim
            96
        """
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def value_dim(self) -> int:
        """The width of a value."""
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    def routed(self, layer: int) -> ExpertsConfig | None:
        """The routed MLP of a layer; None: it has a dense one."""
        experts = self.experts
        return None if experts is None or layer < experts.first_k_dense_replace else experts

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> "LlamaConfig":
        """Reads the `config.json` of a checkpoint in the format of transformers 4 or 5.

        A missing field has its default in transformers. Fields other than the attributes above are ignored
        if they are null or known not to change the logits; all others are refused by name.

        Args:
            path: the file.

        Raises:
            TypeError: `path` is not a path, or a value is of another type.
            ValueError: no file, no JSON, an unknown family, an activation that the family does not have, quantized
                weights, an unknown scaling of the rotary embedding, a field that the family does not have, such as
                `sliding_window` of a Llama, or as the class does.

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
        check_type("path", path, str | os.PathLike, "the path of a config.json")
        entries = read_json(path, "config.json")
        with naming(path):
            return cls(**read_fields(entries))

    def to_json(self) -> dict[str, Any]:
        """The fields of a `config.json` that both transformers 4 and 5 read.

        Raises:
            ValueError: the family of `model_type` has no field for a setting of this decoder.

        Examples:
            >>> from energy_attn.models import LlamaConfig
            >>> LlamaConfig(rope_theta=5e5).to_json()["rope_parameters"]
            {'rope_type': 'default', 'rope_theta': 500000.0}
        """
        entries = write_fields(vars(self))
        settings, read = self._settings(), LlamaConfig(**read_fields(entries))._settings()
        if lost := [name for name, x in settings.items() if read[name] != x]:
            raise ValueError(
                f"{lost[0]}: wanted what a checkpoint of {self.model_type!r} can say, got {settings[lost[0]]}"
            )
        return entries

    def stored(self, name: str, shape: tuple[int, ...]) -> StoredWeight:
        """Returns the place in a checkpoint of the weight of this name and shape."""
        return VARIANTS[self.model_type].stored(self, name, shape)

    def ignores(self, name: str, names: Collection[str]) -> bool:
        """Whether a checkpoint with tensors of these `names` may have this one, which holds none of its weights.

        True for rotary frequencies, a copy of the embedding, and layers after the last one that draft tokens.
        """
        is_head = self.tie_word_embeddings and name == "lm_head.weight"
        if is_head or name.endswith(".rotary_emb.inv_freq"):
            return True
        layer = _LAYER.match(name)
        if layer is None or int(layer[1]) < self.num_hidden_layers:
            return False
        drafts = VARIANTS[self.model_type].has_drafting_layers
        return drafts and f"{layer[0]}eh_proj.weight" in names

    def _settings(self) -> dict[str, Any]:
        """The decoder's settings in a canonical form: configurations of equal decoders have equal ones."""
        values, layers = dict(vars(self)), range(self.num_hidden_layers)
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
            >>> from energy_attn.models import LlamaConfig, Rope
            >>> LlamaConfig(rope_scaling=Rope.linear(4.0)).context_length
            8192
        """
        if isinstance(self.rope_scaling, LinearRope | DynamicRope):
            # by convention, max_position_embeddings is then the length before scaling
            return int(self.max_position_embeddings * self.rope_scaling.factor)
        return self.max_position_embeddings
