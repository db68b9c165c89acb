"""Prefix trees: drafted continuations verified in one pass, for speculative decoding.

A `PrefixTree` is made from a beam, from parents or from a fixed set of choices, and `grow` adds the likeliest
nodes. A model reads the nodes at the positions `context + tree.depth`, and its layers attend by
`tree_decode`; `verify` returns the accepted path, and `commit` appends the path's keys and values
to the cache. The next round begins with the token that `verify` returned.

Examples:
    >>> import jax, jax.numpy as jnp
    >>> from energy_attn.prefix_tree import PrefixTree, verify
    >>> tree = PrefixTree.from_beam(jnp.array([[[5, 1, 2], [5, 3, 4]]]))
    >>> logits = jax.nn.one_hot(jnp.array([[3, 0, 0, 4, 9, 0]]), 10)  # of a model, after each node
    >>> accepted = verify(tree, logits)
    >>> tree.tokens[0][accepted.path[0]].tolist(), accepted.token.tolist()
    ([5, 3, 4], [9])
"""

from ._accept import Accepted as Accepted
from ._accept import accept_greedy as accept_greedy
from ._accept import accept_sampling as accept_sampling
from ._accept import verify as verify
from ._decode import commit as commit
from ._decode import grow as grow
from ._decode import tree_decode as tree_decode
from ._tree import PrefixTree as PrefixTree
