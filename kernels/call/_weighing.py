"""Numbers of the tokens of a context, which are added to their scores in every attention inside a function."""

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

# By which a program shows where they are added.
TOKEN_SCORES = "energy_attn_token_scores"
# The `TokenScores` in force, the outermost first. JAX's caches tell programs by them.
weighing = jax.make_user_context(())


class TokenScores:
    """What is added to the scores of each key while a function is traced; equal to itself alone.

    Attributes:
        scores: `[B, S]` or `[1, S]`.
        used: whether an attention has added them.
    """

    def __init__(self, scores: Float[Array, "B S"]):
        self.scores = scores
        self.used = False


def with_token_scores(bias: Array | None, batch: int, key_len: int) -> Array | None:
    """A bias with the scores in force added.

    Raises `ValueError` for an attention over other keys than those that they are of.
    """
    for active in weighing.value:
        rows, number = active.scores.shape
        if number != key_len or rows not in (1, batch):
            raise ValueError(
                f"segments: wanted one for each key of every attention, of {batch} rows of {key_len} keys; "
                f"got {rows} of {number} (a cache or another sequence has keys of its own)"
            )
        active.used = True
        added = checkpoint_name(active.scores, TOKEN_SCORES)[:, None, None]
        bias = added if bias is None else bias.astype(added.dtype) + added
    return bias
