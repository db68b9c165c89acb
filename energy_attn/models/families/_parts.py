"""Routed MLPs, latent attention and kinds of layers, as a configuration describes and checks them."""

from dataclasses import dataclass
from typing import Any, Literal

from energy_attn.kernels.internal import check_choice, received

from ..decoder._config import check_numbers


@dataclass(frozen=True)
class ExpertsConfig:
    r"""A routed MLP: each token goes to the `num_experts_per_tok` MLPs of the highest scores, of many.

    $$y = s \sum_{e \in \mathrm{top}\,k} w_e \, \mathrm{MLP}_e(x), \qquad w = \mathrm{softmax}(W_r x)$$

    and the weights $w$ of the chosen ones are divided by their sum, if `norm_topk_prob`.

    Attributes:
        num_experts: number of MLPs.
        num_experts_per_tok: $k$.
        intermediate_size: width inside one of them.
        scoring: `"softmax"`, or `"sigmoid"`: $w_e = \sigma((W_r x)_e)$, and experts are chosen by $w_e + b_e$ with a
            correction $b$ that is a weight of the router.
        norm_topk_prob: whether the weights of the chosen experts are divided by their sum.
        routed_scaling_factor: $s$.
        n_group: the experts lie in so many groups of one size.
        topk_group: experts are chosen from so many groups, of the largest sums of their two best scores.
        n_shared_experts: the width of an MLP that every token goes to, in widths of an expert.
        first_k_dense_replace: so many layers in front have the plain MLP instead.
        bias: whether router and experts have biases.
        swiglu_limit: $l$: the MLPs are $W_d\,((u + 1) \circ g \circ \sigma(\alpha g))$ with $g$ cut off above $l$,
            and $u$ outside of $\pm l$; None: they are $W_d\,(u \circ \mathrm{act}(g))$ like all MLPs.
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
        check_choice("scoring", self.scoring, ("softmax", "sigmoid"))
        if self.num_experts % self.n_group:
            raise ValueError(
                f"n_group: wanted a divisor of the {self.num_experts} experts, got {self.n_group}"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group: wanted at most the {self.n_group} groups, got {self.topk_group}"
            )
        most = self.num_experts // self.n_group * self.topk_group
        if self.num_experts_per_tok > most:
            raise ValueError(
                f"num_experts_per_tok: wanted at most the {most} experts of {self.topk_group} groups, "
                f"got {self.num_experts_per_tok}"
            )
        if self.n_group > 1 and self.num_experts // self.n_group < 2:
            raise ValueError(f"n_group: wanted groups of two or more experts, got {self.n_group}")


@dataclass(frozen=True)
class LatentConfig:
    r"""Multi-head latent attention: keys and values of all heads are maps of one narrow vector.

    A part of each key is that of all heads and is turned by the rotary embedding; the rest is not turned:

    $$k_n = [\,W_n^K c,\ \mathrm{rope}(k^R)\,], \qquad v_n = W_n^V c, \qquad [c,\, k^R] = W^{KV} x$$

    with $c$ normed, and queries likewise from a vector of `q_lora_rank` numbers.

    Attributes:
        kv_lora_rank: width of $c$.
        qk_rope_head_dim: width of the part that is turned, even.
        qk_nope_head_dim: width of the part that is not.
        v_head_dim: width of a value.
        q_lora_rank: width of the vector of queries; None: queries are a map of $x$.
        rope_interleave: whether the pairs that are turned are neighbours in the files, and not the two halves.

    Raises:
        TypeError: a size is not an integer, or `rope_interleave` no bool.
        ValueError: a size below 1, or an odd width that is turned.

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
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim: wanted an even number, got {self.qk_rope_head_dim}"
            )

    @property
    def head_dim(self) -> int:
        """The width of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


# `config` is a `LlamaConfig`, whose module imports this one.


def check_latent(config: Any) -> None:
    latent, heads = config.latent, config.num_attention_heads
    if not isinstance(latent, LatentConfig):
        raise TypeError(f"latent: wanted a LatentConfig or None, got {received(latent)}")
    wanted: dict[str, tuple[Any, ...]] = {
        "num_key_value_heads": (heads,),
        "head_dim": (None, latent.head_dim),
        "qk_norm": (False,),
        "attention_sinks": (False,),
    }
    for name, allowed in wanted.items():
        if (given := getattr(config, name)) not in allowed:
            raise ValueError(
                f"{name}: wanted {allowed[-1]} beside latent attention, got {received(given)}"
            )


def check_layers(config: Any, name: str, kinds: tuple[Any, ...]) -> None:
    given, count = getattr(config, name), config.num_hidden_layers
    if given is None:
        return
    if not isinstance(given, tuple):
        raise TypeError(f"{name}: wanted a tuple or None, got {received(given)}")
    if len(given) != count or any(x not in kinds for x in given):
        wanted = " or ".join(map(repr, kinds))
        raise ValueError(f"{name}: wanted {wanted} for each of {count} layers, got {given}")
