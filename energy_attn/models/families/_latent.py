"""Multi-head latent attention, as a configuration describes it."""

from dataclasses import dataclass

from energy_attn.kernels.internal import check_flag, check_integer


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
        for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            check_integer(name, getattr(self, name), 1)
        if check_integer("qk_rope_head_dim", self.qk_rope_head_dim, 2) % 2:
            raise ValueError(
                f"qk_rope_head_dim: wanted an even number, got {self.qk_rope_head_dim}"
            )
        if self.q_lora_rank is not None:
            check_integer("q_lora_rank", self.q_lora_rank, 1)
        check_flag("rope_interleave", self.rope_interleave)

    @property
    def head_dim(self) -> int:
        """The width of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
