"""Weights of keys, their sums, draws of keys, and the divergence of another measure."""

import abc

import equinox as eqx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from energy_attn.kernels.internal import check_integer, check_key, received

from ..functional._free_energy import Calls, Parts
from . import _divergence, _weights
from ._weights import Selection


class AbstractWeights(eqx.Module):
    r"""The weights $P_a = e^{s_a - F}$ of each row over its keys."""

    @abc.abstractmethod
    def _prepared(self) -> tuple[Calls, Parts]:
        """The prepared calls, promoted, with the source of the measure as part of their scores."""

    @abc.abstractmethod
    def _prepared_keys(self) -> tuple[Calls, Parts]:
        """The prepared calls of the keys alone, with their sinks apart."""

    def weights(
        self, *, rows: Selection | None = None, keys: Selection | None = None
    ) -> Float[Array, "*B R N J"]:
        r"""The attention weights of some keys in some rows.

        $$P_{ia} = e^{s_{ia} - F_i}, \qquad i \in \text{rows},\ a \in \text{keys}$$

        The only answer that holds a matrix: $B R N J$ numbers of four bytes (eight for float64 arrays), for
        interpretability and pictures. The energies of all rows are of one flash pass. Rows and keys
        are counted in the arrays, also where they lie on many devices.

        Args:
            rows: which queries: an integer, a slice or one axis of integers, negative ones from the end; None: all.
            keys: which keys, likewise; in a union those of the first measure, then those of the second. None: all.

        Returns:
            `[B, R, N, J]` or `[R, N, J]`, float32 or float64; zero for a key that a row does not see. With all keys a
            row sums up to 1, or to the share that a sink leaves. NaN for a traced index that is out of range.

        Raises:
            TypeError: an index that is no integer.
            ValueError: an index out of range, or more than 64 million weights.

        Source: Vaswani et al. (arXiv 1706.03762), equation 1: the softmax.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
            >>> F = ea.FreeEnergy(is_causal=True).at(q, k, v)
            >>> F.weights(rows=-1, keys=slice(0, 3)).shape  # of the first three keys in the last row
            (1, 2, 3)
            >>> F.weights(rows=0)[0, 0].tolist()  # the first query sees the first key alone
            [1.0, 0.0, 0.0, 0.0, 0.0]
        """
        return _weights.weights(*self._prepared_keys(), rows, keys)

    def importance(
        self, rows: Float[Array, "*B T N"] | None = None, *, grouped: bool = False
    ) -> Float[Array, "*B S heads"]:
        r"""How much each key is read: the sum of its weights over the rows.

        $$I_a = \sum_i r_i P_{ia} = \frac{\partial}{\partial b_a} \sum_i r_i F_i$$

        for a number $b_a$ that is added to the scores of key $a$. One forward and one backward pass, in memory
        linear in the keys. It is what eviction from a cache goes by, and finds keys that are sinks.

        Args:
            rows: $r$, `[B, T, N]` or `[T, N]`: a factor for each query and head; None: 1.
            grouped: whether to sum over the heads of queries that share a head of keys.

        Returns:
            `[B, S, N]` or `[S, N]`; `[B, S, K]` or `[S, K]` if `grouped`; float32 or float64. In a union, the keys
            of the first measure, then those of the second. Over all keys it sums up to the number of rows that see one,
            less what sinks take.

        Raises:
            TypeError: `rows` is not a floating array, or `grouped` no boolean.
            ValueError: `rows` has another shape.

        Source: H2O (arXiv 2306.14048), section 4: heavy hitters are keys of the largest accumulated weight.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
            >>> F = ea.FreeEnergy(is_causal=True).at(q, k, v)
            >>> bool(jnp.allclose(F.importance(), F.weights().sum(0).T, atol=1e-5))
            True
        """
        return _weights.importance(*self._prepared_keys(), rows, grouped)

    def sample(self, *, key: PRNGKeyArray, count: int = 1) -> Int[Array, "*B T N count"]:
        r"""Draws keys for each query and head from its attention weights.

        $$a \sim P, \qquad P_a = e^{s_a - F}$$

        One pass over blocks of keys, by XLA's operations: a draw is the key of the largest sum of its score and of
        noise of Gumbel's distribution. The noise depends on `key`, the row, the index of the key and the draw. So draws
        are the same on any mesh, and those from a union are those from all its keys together, but where two sums are
        equal up to their rounding. Draws are independent, with replacement; the mean of the drawn values converges to
        attention. There is no derivative. Each draw takes a number of noise for each key.

        Args:
            key: a `jax.random.key`.
            count: draws for each query and head.

        Returns:
            int32 `[B, T, N, count]`: indices along the axis of the keys (in a union, those of the
            first measure's keys, then those of the second's); -1 for a fully masked row. A sink has the
            index after those of all keys (in a union, the sinks in the order of the measures), for which
            `jnp.take(..., mode="fill", fill_value=0)` reads its value.

        Raises:
            TypeError: `key` is not a key, or `count` not an integer.
            ValueError: `count` is below 1.

        Source: Maddison, Tarlow and Minka, A* Sampling (arXiv 1411.0030), section 2: the Gumbel-max trick.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
            >>> drawn = ea.FreeEnergy(is_causal=True).at(q, k, v).sample(key=jax.random.key(1), count=3)
            >>> drawn.shape, drawn[0].tolist()  # the first query sees only the first key
            ((5, 2, 3), [[0, 0, 0], [0, 0, 0]])
        """
        check_integer("count", count, least=1)
        check_key("key", key)
        return _weights.sample_keys(*self._prepared(), key, count)

    def kl(self, other: "AbstractWeights") -> Float[Array, "*B T N"]:
        r"""The Kullback-Leibler divergence of another measure over the same keys from this one.

        $$\mathrm{KL}(P \| Q) = \sum_a P_a \log \frac{P_a}{Q_a}
            = \mathbb{E}_P[s_P] - \mathbb{E}_P[s_Q] - F_P + F_Q$$

        the Bregman divergence of $F$ in the scores. The other measure has queries and keys of its own, of any
        width and number of key heads, a scale, a score and a mask: it is $+\infty$ in a row in which this one
        sees a key that the other hides. For indexers that imitate attention, distillation, and heads that say the same.

        Where scores are products of queries and keys, and both have the same mask (the same arrays, if it has any): two
        flash passes, the first with the keys of both in the place of the values. Otherwise the second is
        a walk over blocks of both scores, by XLA's operations. Never a matrix of weights.

        Args:
            other: $Q$, a measure of as many rows and keys; a union is compared part by part, a sink with the sink of
                the same part.

        Returns:
            `[B, T, N]` in nats, at least 0; zero in a row that is fully masked in $P$. Its rounding grows
            as $\epsilon \lvert F \rvert$.

        Raises:
            TypeError: `other` is no measure, or its energies have another precision.
            ValueError: the number of its rows, keys or parts differs.

        Source: Bregman, USSR Comput. Math. Math. Phys. 7 (1967); Banerjee et al., JMLR 6 (2005), section 4: the
        divergence of an exponential family is that of its log partition function.

        Examples:
            >>> import jax
            >>> import energy_attn as ea
            >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
            >>> P, Q = (ea.FreeEnergy(is_causal=True).at(x, k, v) for x in (q, u))
            >>> P.kl(Q).shape, float(P.kl(P).max()) < 1e-6, bool((P.kl(Q) >= 0).all())
            ((5, 2), True, True)
        """
        return _divergence.kl_divergence(self._crossed(other))

    def cross_entropy(self, other: "AbstractWeights") -> Float[Array, "*B T N"]:
        r"""The cross-entropy of another measure over the same keys under this one.

        $$-\sum_a P_a \log Q_a = F_Q - \mathbb{E}_P[s_Q] = \mathrm{KL}(P \| Q) + H(P)$$

        At the cost of [`kl`][energy_attn.Gibbs.kl], with its arguments, errors and conventions.

        Args:
            other: $Q$.

        Returns:
            `[B, T, N]` in nats.

        Source: as `kl`.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> q, k, v, u = jax.random.normal(jax.random.key(0), (4, 5, 2, 4))
            >>> P, Q = (ea.FreeEnergy().at(x, k, v) for x in (q, u))
            >>> bool(jnp.allclose(P.cross_entropy(Q), P.kl(Q) + P.entropy(), atol=1e-5))
            True
        """
        return _divergence.cross_entropy(self._crossed(other))

    def _crossed(self, other: object) -> _divergence.CrossScores:
        if not isinstance(other, AbstractWeights):
            raise TypeError(f"other: wanted a Gibbs, got {received(other)}")
        return _divergence.cross_scores(self._prepared_keys(), other._prepared_keys())
