"""The options of a call, each declared once: its name, its type and what it does."""

import difflib
from collections.abc import Iterable, Sequence
from typing import TypedDict

from jaxtyping import Array, Float, Int

from ..scores._abstract import AbstractScore
from ._kernel import Candidate


class ScoreOptions(TypedDict, total=False):
    """Options for the scores, for the keys that a query may see, and for the kernel."""

    scale: float | Float[Array, ""] | Float[Array, " N"] | None
    r"""The factor of $q \cdot k$, an inverse temperature; None is $1/\sqrt{H}$. An array, a scalar or one number
    for each head of queries, may be traced and differentiated. A float is part of the program, and another float is
    compiled anew; an array is not, and neither is a float that is an argument of `jax.jit`."""

    is_causal: bool
    """Whether to hide keys whose position is after the query's; False if not given."""

    local_window_size: (
        int | Int[Array, "..."] | tuple[int | Array | None, int | Array | None] | None
    )
    """`(left, right)`, or one int for both: only keys at positions in `[query - left, query + right]`
    are seen. None for a side is any distance. An integer array, a scalar or `[2]`, or a scalar for a side, may be
    traced, so that layers with different windows are one program
    ([`TracedWindow`][energy_attn.kernels.masks.TracedWindow])."""

    max_window: int | tuple[int | None, int | None] | None
    """The static bound of a window that is an array: keys outside of it are hidden, and over a mesh only the keys
    inside are sent. None: any distance, and a traced window sends all keys."""

    score: AbstractScore | None
    """A [score][energy_attn.kernels.scores.AbstractScore], a function of the scaled product of a query
    and a key; None is the product itself."""

    implementation: Candidate | Sequence[Candidate] | None
    """A name of [`implementations`][energy_attn.kernels.implementations], `"xla"` for those that XLA
    alone runs, an [`AbstractKernel`][energy_attn.kernels.AbstractKernel] of your own, or several of
    these to try in turn; None tries all."""

    reproducible: bool
    """Whether the bits of a row depend on it, on the keys that it sees with their positions and on the options alone:
    not on the mesh, the other rows of the call, the arrays' sizes or the transformations around it. False if not given;
    [what it costs](../reproducible.md)."""


class RowOptions(TypedDict, total=False):
    """Positions, segments and presence of queries and keys."""

    query_seq_lengths: Int[Array, "..."] | None
    """`[B]` integers; queries at this index and after are absent."""

    key_value_seq_lengths: Int[Array, "..."] | None
    """`[B]` integers; keys at this index and after are absent."""

    query_positions: Int[Array, "..."] | None
    """`[B, T]` integers of 32 bits, the global positions that causality and windows compare; None is
    `0 … T-1`. Negative: the query is absent."""

    key_positions: Int[Array, "..."] | None
    """`[B, S]` integers, as for queries; negative for unfilled cache slots."""

    query_segment_ids: Int[Array, "..."] | None
    """`[B, T]` integers: a query sees only the keys of its own segment, as for several documents packed
    into one row. Given together with `key_segment_ids`. Traced ones of 64 bits are compared as such, which
    kernels for one platform decline: cast to int32 what 32 bits hold."""

    key_segment_ids: Int[Array, "..."] | None
    """`[B, S]` integers, as for queries."""


class KernelOptions(ScoreOptions, RowOptions, total=False):
    """The options of the functions that compute a state."""


class MergedScoreOptions(ScoreOptions, total=False):
    """Options for the scores of a row over all of its keys."""

    sink: Float[Array, "... N"] | None
    r"""$b$, `[N]` or `[B, N]`: the score, in nats, of one more outcome whose value is zero,
    $F = \log(e^{F_{keys}} + e^b)$. It may be traced and differentiated. A fully masked row has
    `out = 0` and $F = b$; an absent query has no sink. None, and minus infinity: there is none."""


class MergedOptions(MergedScoreOptions, RowOptions, total=False):
    """The options of functions that compute the state of all keys of a row."""


# What to write here, and how other libraries call it.
_SAID_ELSEWHERE = {
    "is_causal": "causal use_causal_mask",
    "mask (True: a key takes part)": "attn_mask attention_mask key_padding_mask padding_mask",
    "mask=masks.Function(function)": "mask_mod mask_fn mask_function",
    "bias": "attn_bias attention_bias",
    "score=scores.Function(function)": "score_mod score_fn",
    "score=scores.SoftCap(c)": "softcap soft_cap logits_soft_cap attn_logits_soft_cap",
    "score=scores.ALiBi(slopes)": "alibi_slopes",
    "scale": "sm_scale softmax_scale scaling beta",
    "local_window_size": "window_size sliding_window window",
    "sink": "s_aux sinks softmax_aux",
    "query_positions and key_positions": "positions position_ids",
    "query_segment_ids and key_segment_ids": "segment_ids q_segment_ids kv_segment_ids",
    "return_energy": "return_lse return_softmax_lse",
    "free_energy(query, key, value, source=source)": "source",
    "FreeEnergy().at(query, key, value)": "query key value",
    "nn.MultiheadAttention(dropout_p=p)": "dropout dropout_p dropout_rate",
    "FreeEnergy().at(query, key, value).weights()": "need_weights output_attentions",
}
_MEANT = {name: said for said, names in _SAID_ELSEWHERE.items() for name in names.split()}


def check_options(
    names: Iterable[str], declared: type, *arguments: str, fields: type | None = None
) -> None:
    """Raises `TypeError` for a name that is none of the keys of the `TypedDict` `declared`.

    The error names what was meant: one of these keys or of the other `arguments`, or one of the `fields` of an energy.
    """
    known = (*arguments, *declared.__annotations__)
    for name in names:
        if name not in known:
            meant = _meant(name, known, () if fields is None else tuple(fields.__annotations__))
            wanted = f"a known option (did you mean {meant}?)" if meant else ", ".join(known)
            raise TypeError(f"{name}: wanted {'' if meant else 'one of '}{wanted}, got {name!r}")


def _meant(name: str, known: tuple[str, ...], fields: tuple[str, ...]) -> str | None:
    close = difflib.get_close_matches(name, (*known, *fields), 1, 0.75)
    for said in (name, _MEANT.get(name, name), *close):
        option = said.partition("=")[0].partition(" ")[0]
        if option in known or "(" in option:
            return said
        if option in fields:
            return f"FreeEnergy({said if '=' in said else f'{said}=...'})"
    return None
