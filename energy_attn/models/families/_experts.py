"""A routed MLP, as a configuration describes it."""

from dataclasses import dataclass
from typing import Literal

from energy_attn.kernels.internal import (
    check_choice,
    check_finite_number,
    check_flag,
    check_integer,
)


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
        for name in ("num_experts", "num_experts_per_tok", "intermediate_size", "n_group"):
            check_integer(name, getattr(self, name), 1)
        for name in ("n_shared_experts", "first_k_dense_replace"):
            check_integer(name, getattr(self, name), 0)
        check_integer("topk_group", self.topk_group, 1)
        check_choice("scoring", self.scoring, ("softmax", "sigmoid"))
        for name in ("norm_topk_prob", "bias"):
            check_flag(name, getattr(self, name))
        for name in ("routed_scaling_factor", "swiglu_alpha"):
            check_finite_number(name, getattr(self, name))
        if self.swiglu_limit is not None:
            check_finite_number("swiglu_limit", self.swiglu_limit)
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
