"""How a family of decoders differs from a Llama in its `config.json` and its tensors."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from energy_attn.kernels.internal import checks

from ..checkpoint._config import check_only, renaming
from ..decoder._config import StoredWeight, check_numbers, check_that, check_type


@dataclass(frozen=True)
class ExpertsConfig:
    r"""A routed MLP (mixture of experts): each token goes to the `num_experts_per_tok` MLPs of the highest scores.

    $$y = s \sum_{e \in \mathrm{top}\,k} w_e \, \mathrm{MLP}_e(x), \qquad w = \mathrm{softmax}(W_r x)$$

    with the weights $w$ of the chosen experts divided by their sum, if `norm_topk_prob`.

    Attributes:
        num_experts: number of experts.
        num_experts_per_tok: $k$.
        intermediate_size: width inside an expert.
        scoring: `"softmax"`, or `"sigmoid"`: $w_e = \sigma((W_r x)_e)$, and experts are chosen by $w_e + b_e$ with a
            correction $b$ that is a weight of the router.
        norm_topk_prob: whether the weights of the chosen experts are divided by their sum.
        routed_scaling_factor: $s$.
        n_group: the number of groups that experts are in, of one size.
        topk_group: the number of groups that experts are chosen from: those of the largest sums of two best scores.
        n_shared_experts: the width of an MLP that every token goes to, as a multiple of an expert's; 0: none.
        first_k_dense_replace: the number of first layers that have the dense MLP instead.
        bias: whether router and experts have biases.
        swiglu_limit: $l$: experts are $W_d\,((u + 1) \circ g \circ \sigma(\alpha g))$ with $g$ clipped above at $l$
            and $u$ to $\pm l$; None: they are $W_d\,(u \circ \mathrm{act}(g))$, as dense MLPs are.
        swiglu_alpha: $\alpha$.

    Raises:
        TypeError: a size is not an integer, a factor not a number, or a flag not a bool.
        ValueError: a number out of range, more experts for a token than there are, groups that do not divide the
            experts, or an unknown scoring.

    Source: Shazeer et al. (arXiv 1701.06538), equations 1 to 3; sigmoids, groups and shared experts: DeepSeek-V3 (arXiv
    2412.19437), equations 12 to 16.

    Examples:
        >>> from energy_attn.models import ExpertsConfig, LlamaConfig
        >>> experts = ExpertsConfig(num_experts=8, num_experts_per_tok=2, intermediate_size=14336)
        >>> LlamaConfig(model_type="mixtral", intermediate_size=14336, experts=experts).experts.norm_topk_prob
        True
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        check_numbers(self, least={"n_shared_experts": 0, "first_k_dense_replace": 0})
        checks.check_choice("scoring", self.scoring, ("softmax", "sigmoid"))
        count, groups, best = self.num_experts, self.n_group, self.topk_group
        each = count // groups
        check_that(self, "n_group", count % groups == 0, f"a divisor of the {count} experts")
        check_that(self, "topk_group", best <= groups, f"at most the {groups} groups")
        fits = self.num_experts_per_tok <= each * best
        wanted = f"at most the {each * best} experts of {best} groups"
        check_that(self, "num_experts_per_tok", fits, wanted)
        fits = groups == 1 or each >= 2
        check_that(self, "n_group", fits, "groups of two or more experts")


@dataclass(frozen=True)
class LatentConfig:
    r"""Multi-head latent attention (MLA): keys and values of all heads are projections of one narrow vector.

    All heads share a part of their keys, which the rotary embedding rotates; it does not rotate the rest:

    $$k_n = [\,W_n^K c,\ \mathrm{rope}(k^R)\,], \qquad v_n = W_n^V c, \qquad [c,\, k^R] = W^{KV} x$$

    with $c$ normed. Queries are projections of another such vector.

    Attributes:
        kv_lora_rank: width of $c$.
        qk_rope_head_dim: width of the part that is rotated, even.
        qk_nope_head_dim: width of the part that is not rotated.
        v_head_dim: width of a value.
        q_lora_rank: width of the vector of queries; None: queries are projections of $x$.
        rope_interleave: whether pairs that are rotated are neighbours in the files, instead of two halves.

    Raises:
        TypeError: a size is not an integer, or `rope_interleave` not a bool.
        ValueError: a size is below 1, or `qk_rope_head_dim` is odd.

    Source: DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19.

    Examples:
        >>> from energy_attn.models import LatentConfig
        >>> LatentConfig(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128).head_dim
        192
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        check_numbers(self, least={"qk_rope_head_dim": 2})
        check_that(self, "qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "an even number")

    @property
    def head_dim(self) -> int:
        """The width of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
# Fields without effect on logits: losses of training, and further outputs.
_TRAINING = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
# In float32 also in files of 16 bits, as it decides between experts of nearly equal scores.
_CORRECTION = "e_score_correction_bias"
_EXPERT = re.compile(r"(.*)\.experts\.(gate_proj|up_proj|down_proj)")


class ExpertFields(NamedTuple):
    # for names of an `ExpertsConfig`: the name in the file, and its default
    fields: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any] = {}  # attributes that are the same in the whole family
    newer: Mapping[str, str] = {}  # names of some fields in files of transformers 5

    @property
    def names(self) -> tuple[str, ...]:
        return (*(name for name, _ in self.fields.values()), *self.newer.values(), *_TRAINING)

    def read(self, values: Mapping[str, Any]) -> ExpertsConfig:
        attributes = {"intermediate_size": values["intermediate_size"], **self.fixed}
        for name, (theirs, default) in self.fields.items():
            attributes[name] = values.get(self.newer.get(name, theirs), values.get(theirs, default))
        with renaming({name: theirs for name, (theirs, _) in self.fields.items()}):
            return ExpertsConfig(**attributes)

    def write(self, experts: ExpertsConfig) -> dict[str, Any]:
        return {theirs: getattr(experts, name) for name, (theirs, _) in self.fields.items()}


class Variant(NamedTuple):
    """A family whose decoder is a Llama under flags; static."""

    architecture: str  # the name of transformers' class
    activation: str = "silu"  # inside the MLP
    # the default base of the rotary embedding of layers with a window; None: they have no base of their own
    local_theta: float | None = None
    defaults: Mapping[str, Any] = {}  # transformers' values of missing fields
    fixed: Mapping[
        str, Any
    ] = {}  # attributes of a `LlamaConfig` that are the same in the whole family
    own: Mapping[str, Any] = {}  # attributes under the same name in a file, with their defaults
    only: Mapping[str, Any] = {}  # fields of a file, with the only value that is supported
    experts: ExpertFields | None = None  # the fields of routed MLPs; None: MLPs are dense
    fields: tuple[str, ...] = ()  # names of further fields in a file
    # further attributes, from the fields and the sizes, with defaults filled in
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {}
    # the fields that `read` reads, from the attributes
    write: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda values: {}
    rope: Mapping[str, Any] = {}  # the rotary embedding of a file that has none
    rope_types: Mapping[str, str] = {}  # older names of types of rotary embeddings
    original: str | None = (
        None  # the field with the context before scaling, if outside the rotary embedding
    )
    quantized: str | None = None  # the quantization that files may have
    has_drafting_layers: bool = False  # whether files may have further layers, which draft tokens
    # the place of a weight in a checkpoint, from the `LlamaConfig`, the weight's name and its shape
    stored: Callable[[Any, str, tuple[int, ...]], StoredWeight] = lambda config, name, shape: (
        StoredWeight((name,))
    )

    @property
    def names(self) -> tuple[str, ...]:
        experts = () if self.experts is None else self.experts.names
        return (*self.own, *self.only, *experts, *self.fields)

    def attributes(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes of a `LlamaConfig` from these fields and the sizes; raises `TypeError` or `ValueError`."""
        check_only(values, self.only)
        attributes = {name: values.get(name, x) for name, x in self.own.items()}
        attributes |= self.read(values)
        return attributes | ({} if self.experts is None else {"experts": self.experts.read(values)})

    def entries(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `attributes`; some may be lost."""
        fields = {name: values[name] for name in self.own} | self.write(values)
        if self.experts is None or values["experts"] is None:
            return fields
        return fields | self.experts.write(values["experts"])


def read_windows(values: Mapping[str, Any]) -> dict[str, Any]:
    """The window and the kinds of layers, in families where `use_sliding_window` switches the window on.

    Without `layer_types`, layers from `max_window_layers` on have it.
    """
    types, used = read_list(values, "layer_types"), values.get("use_sliding_window")
    if used is None or not checks.check_flag("use_sliding_window", used):
        if any(kind != FULL for kind in types or ()):
            raise ValueError(
                f"layer_types: wanted {FULL!r} without use_sliding_window, got {list(types or ())}"
            )
        return {}
    size = values.get("sliding_window", 4096)
    if size is None:
        return {}
    if types is None:
        first = checks.check_integer("max_window_layers", values.get("max_window_layers", 28), 0)
        layers = range(values["num_hidden_layers"])
        types = tuple(SLIDING if i >= first else FULL for i in layers)
    return {"sliding_window": size, "layer_types": types}


def write_windows(values: Mapping[str, Any]) -> dict[str, Any]:
    size, layers = values["sliding_window"], values["num_hidden_layers"]
    types = list(values["layer_types"] or [FULL if size is None else SLIDING] * layers)
    # transformers takes the layers from this number on where there are no types
    first = types.index(SLIDING) if SLIDING in types else layers
    return {
        "use_sliding_window": size is not None,
        "sliding_window": size,
        "max_window_layers": first,
        "layer_types": types,
    }


def read_types(values: Mapping[str, Any], pattern: int) -> dict[str, Any]:
    """The kinds of layers: `layer_types`, or every `pattern`-th one sees all tokens."""
    types = read_list(values, "layer_types")
    if types is None:
        layers = range(1, values["num_hidden_layers"] + 1)
        types = tuple(SLIDING if i % pattern else FULL for i in layers)
    return {"layer_types": types}


def write_types(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"layer_types": list(values["layer_types"] or [SLIDING] * values["num_hidden_layers"])}


def as_tuple(name: str, x: Any) -> tuple[Any, ...]:
    check_type(name, x, list, "a list")
    return tuple(x)


def read_list(values: Mapping[str, Any], name: str) -> tuple[Any, ...] | None:
    x = values.get(name)
    return None if x is None else as_tuple(name, x)


def each_expert(
    names: Mapping[str, str], prefix: Callable[[str], str] = str
) -> Callable[[Any, str, tuple[int, ...]], StoredWeight]:
    """Places of weights in files with a tensor for each expert, whose projections have other `names`."""

    def stored(config: Any, name: str, shape: tuple[int, ...]) -> StoredWeight:
        match = _EXPERT.fullmatch(name)
        if match is None:
            kind = np.dtype(np.float32) if name.endswith(_CORRECTION) else None
            return StoredWeight((prefix(name),), dtype=kind)
        path, part = prefix(match[1]), names.get(match[2], match[2])
        each = tuple(f"{path}.experts.{i}.{part}.weight" for i in range(shape[0]))
        return StoredWeight(each, is_split=True)

    return stored
