"""What of a call reads positions, which a layout then has to give."""

import jax.numpy as jnp
import pytest

from energy_attn import masks, scores
from tests.support.problems import call_of

READ = {
    "a causal mask": lambda: {"is_causal": True},
    "a window": lambda: {"local_window_size": (2, None)},
    "a rule": lambda: {"mask": masks.Prefix(jnp.array([2]))},
    "documents": lambda: {"mask": masks.Segments(jnp.zeros((1, 4), jnp.int32))},
    "lengths of a rule": lambda: {"mask": masks.Lengths(keys=jnp.array([2]))},
    "lengths of keys": lambda: {"key_value_seq_lengths": jnp.array([2])},
    "a score of positions": lambda: {"score": scores.ALiBi(jnp.ones(2))},
    "leaves": lambda: {"reproducible": True},
}
UNREAD = {
    "nothing": dict,
    "a rule that hides nothing": lambda: {"mask": masks.All()},
    "a window without sides": lambda: {"local_window_size": (None, None)},
    "an array": lambda: {"mask": jnp.ones((1, 1, 4, 4), bool)},
    "segment ids": lambda: dict.fromkeys(
        ("query_segment_ids", "key_segment_ids"), jnp.zeros((1, 4), jnp.int32)
    ),
    "a score of products": lambda: {"score": scores.SoftCap(3.0)},
}


@pytest.mark.parametrize("name", [*READ, *UNREAD])
def test_what_reads_positions(name):
    """Positions of a layout that nothing compares, or their lack where something does."""
    asked = []

    def place(tokens, reads):
        asked.append(bool(reads))
        return tokens

    x = jnp.ones((1, 4, 2, 8))
    call_of(x, x, x, place=place, **(READ | UNREAD)[name]())
    assert asked == [name in READ]
