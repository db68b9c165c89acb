"""`Categorical`: the distribution over a vocabulary that an output layer gives each hidden state."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from energy_attn.kernels.internal import checks

from ._evaluate import Local, OutputLayer, evaluate
from ._parallel import VocabularyParallel, plan_of
from ._statistics import Asked, LayerStatistics
from ._tiles import measure, mixture_divergence, of_tiles, top_k

_Number = float | Float[Array, "..."]


class Categorical(OutputLayer):
    r"""The distribution of the next token that an output layer gives each hidden state.

    $$p_a = e^{s_a - F}, \qquad s_a = \frac{1}{\tau}\, c \tanh \frac{\alpha\, w_a \cdot h + b_a}{c}, \qquad
      F = \log \sum_a e^{s_a}$$

    without the cap $c$: $s_a = (\alpha\, w_a \cdot h + b_a) / \tau$. Hidden states are queries and words are keys.
    Losses over the vocabulary are free energies and means under their weights, in one pass over blocks of words. No
    array of tokens $\times$ vocabulary is made, in no derivative. Derivatives of any order exist in both modes.
    Methods have the names of TFP's and distrax's.

    Attributes:
        hidden: hidden states, `[*batch, D]`; float16, bfloat16, float32 or float64.
        weight: the output matrix, `[V, D]`, of any of these dtypes; of a model with tied embeddings, their matrix. The
            products have the wider dtype of both, and all sums and results are float32, or float64.
        bias: `[V]`, or None.
        mask: `[V]` booleans, whether a word is allowed: False for padding of the vocabulary, too. None: all are. If no
            word is allowed, $F = -\infty$ and the entropy is 0.
        scale: $\alpha$, a number or an array that broadcasts to `[*batch]`.
        temperature: $\tau$, above 0, a number or an array that broadcasts to `[*batch]`. It applies last.
        soft_cap: $c$, above 0, as in Gemma 2; None: no cap.
        parallel: a `VocabularyParallel`; None: on one device, or as the types on explicit mesh axes say.
        reproducible: whether the bits of results and gradients depend only on the hidden states of a token and on the
            output matrix, not on the batch, padding or the mesh. Logits are then computed in tiles of tokens with all
            words, which gathers a sharded matrix. There is no derivative in forward mode, and none of second order.

    Raises:
        TypeError: an array that is not floating, a mask that is not boolean, or options of another type.
        ValueError: shapes that do not fit each other, a number out of range, or a mesh that does not fit.

    Source: Boltzmann's distribution; Tree Attention (arXiv 2408.04093), section 3, for the free energy; soft caps:
    Gemma 2 (arXiv 2408.00118).

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> keys = jax.random.split(jax.random.key(0), 2)
        >>> hidden, weight = jax.random.normal(keys[0], (3, 8)), jax.random.normal(keys[1], (1000, 8))
        >>> p = ea.Categorical(hidden, weight)
        >>> dense = jax.nn.log_softmax(hidden @ weight.T)
        >>> labels = jnp.array([3, 1, 4])
        >>> bool(jnp.allclose(p.log_prob(labels), dense[jnp.arange(3), labels], atol=1e-5))
        True
        >>> bool(jnp.allclose(p.entropy(), -(jnp.exp(dense) * dense).sum(-1), atol=1e-5))
        True
        >>> float(p.kl_divergence(p).max())
        0.0
    """

    def __init__(
        self,
        hidden: Float[Array, "*batch D"],
        weight: Float[Array, "V D"],
        bias: Float[Array, " V"] | None = None,
        *,
        mask: Bool[Array, " V"] | None = None,
        scale: _Number = 1.0,
        temperature: _Number = 1.0,
        soft_cap: float | None = None,
        parallel: VocabularyParallel | None = None,
        reproducible: bool = False,
    ) -> None:
        hidden = jnp.asarray(checks.check_floating("hidden", hidden))
        if hidden.ndim < 1:
            raise ValueError(f"hidden: wanted shape [*batch, D], got {checks.received(hidden)}")
        weight = jnp.asarray(checks.check_floating("weight", weight))
        checks.check_shape("weight", weight, ("V", hidden.shape[-1]))
        if not len(weight):
            raise ValueError(f"weight: wanted at least one word, got {checks.received(weight)}")
        if bias is not None:
            checks.check_shape("bias", checks.check_floating("bias", bias), (len(weight),))
        if mask is not None:
            checks.check_shape("mask", checks.check_boolean("mask", mask), (len(weight),))
        self.hidden, self.weight, self.bias, self.mask = hidden, weight, bias, mask
        self.scale = _factor("scale", scale, hidden.shape[:-1])
        self.temperature = _factor("temperature", temperature, hidden.shape[:-1], least=0)
        if soft_cap is not None and checks.check_finite_number("soft_cap", soft_cap) <= 0:
            raise ValueError(f"soft_cap: wanted a number above 0, got {soft_cap}")
        self.soft_cap = soft_cap
        self.parallel = parallel
        self.reproducible = checks.check_flag("reproducible", reproducible)
        plan_of(parallel, hidden, weight)

    def log_partition(self) -> Float[Array, "*batch"]:
        r"""The log-partition function of the logits, their free energy $F = \log \sum_a e^{s_a}$, `[*batch]`."""
        return self._measure(Asked()).lse[0]

    def logits_of(self, labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        """The logits of labels; NaN for a traced label that is no word. Raises as `log_prob`."""
        return self._of_labels(labels).label

    def log_prob(self, labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
        r"""The log-probability $\log p_y = s_y - F$ of a label for each hidden state, in nats.

        Minus infinity for a word that the mask hides; NaN for a traced label that is no word.

        Args:
            labels: numbers of words, `[*batch]`, of any integer dtype.

        Returns:
            `[*batch]`, float32 or float64.

        Raises:
            TypeError: labels that are no integers.
            ValueError: another shape, or a label that is known to be no word.

        Examples:
            >>> import jax.numpy as jnp
            >>> import energy_attn as ea
            >>> p = ea.Categorical(jnp.zeros((2, 4)), jnp.ones((8, 4)))
            >>> bool(jnp.allclose(p.log_prob(jnp.array([0, 5])), -jnp.log(8.0)))
            True
        """
        result = self._of_labels(labels)
        return result.label - result.lse[0]

    def entropy(self) -> Float[Array, "*batch"]:
        r"""Shannon's entropy $H = -\sum_a p_a \log p_a = F - \mathbb{E}_p[s]$, in nats, `[*batch]`."""
        return at_least_zero(-self._measure(Asked(((0, 0),))).mean[0])

    def cross_entropy(self, other: "Categorical") -> Float[Array, "*batch"]:
        r"""The cross-entropy $-\sum_a p_a \log q_a$ with another distribution, in nats, `[*batch]`.

        Infinite where the other hides a word that this one allows. Raises as `kl_divergence`.
        """
        return -self._measure(Asked(((0, 1),)), other).mean[0]

    def kl_divergence(self, other: "Categorical") -> Float[Array, "*batch"]:
        r"""The Kullback-Leibler divergence of another distribution from this one, in nats.

        $$\mathrm{KL}(p \| q) = \sum_a p_a (\log p_a - \log q_a) = \mathbb{E}_p[s_p] - \mathbb{E}_p[s_q] - F_p + F_q$$

        Exact over the whole vocabulary, in one pass over both output matrices. In distillation the divergence is
        forward with the teacher first, and reverse with the student first. Gradients flow into the hidden states and
        matrices of both; `jax.lax.stop_gradient` holds one constant.

        Args:
            other: a distribution over as many words, with hidden states of any width for the same `[*batch]`.

        Returns:
            `[*batch]`, at least 0; infinite where `other` hides a word that this one allows.

        Raises:
            TypeError: not a `Categorical`.
            ValueError: another number of words, another batch, or another `parallel`.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> keys = jax.random.split(jax.random.key(0), 4)
            >>> teacher = ea.Categorical(jax.random.normal(keys[0], (5, 16)), jax.random.normal(keys[1], (99, 16)))
            >>> h, w = jax.random.normal(keys[2], (5, 4)), jax.random.normal(keys[3], (99, 4))
            >>> step = jax.grad(lambda h, w: teacher.kl_divergence(ea.Categorical(h, w)).mean(), (0, 1))
            >>> [x.shape for x in step(h, w)]
            [(5, 4), (99, 4)]
        """
        entropy, cross = self._measure(Asked(((0, 0), (0, 1))), other).mean
        return at_least_zero(entropy - cross)

    def js_divergence(self, other: "Categorical") -> Float[Array, "*batch"]:
        r"""The Jensen-Shannon divergence $\tfrac12 \mathrm{KL}(p \| m) + \tfrac12 \mathrm{KL}(q \| m)$, in nats.

        $m = (p + q) / 2$ is the mixture. Between 0 and $\log 2$, and finite where a mask hides words of one.
        Raises as `kl_divergence`.
        """
        both = self, self._fitting(other)
        if self.reproducible:
            divergence = of_tiles(both, lambda scores, _: mixture_divergence(scores))
        else:
            divergence = evaluate(both, Local.mixture_divergence)
        return at_least_zero(divergence)

    def mode(self) -> Int[Array, "*batch"]:
        """The likeliest word of each hidden state, the first of several, `[*batch]` int32."""
        return self._measure(Asked(mode=True)).mode

    def top_k(self, k: int) -> tuple[Float[Array, "*batch k"], Int[Array, "*batch k"]]:
        """The log-probabilities of the `k` likeliest words, and these words, the likeliest first.

        Log-probabilities are differentiable; they take rows of the output matrix, `k` for each hidden state.

        Raises:
            TypeError: `k` is no integer.
            ValueError: `k` is below 1 or above the number of words, or an axis of the mesh splits words and tokens.

        Examples:
            >>> import jax.numpy as jnp
            >>> import energy_attn as ea
            >>> p = ea.Categorical(jnp.ones((2, 1)), jnp.arange(6.0)[:, None])
            >>> p.top_k(3)[1].tolist()
            [[5, 4, 3], [5, 4, 3]]
        """
        size = self.vocab_size
        if checks.check_integer("k", k, 1) > size:
            raise ValueError(f"k: wanted at most the {size} words, got {k}")
        plan = plan_of(self.parallel, self.hidden, self.weight)
        if plan and plan.gathered:
            raise ValueError(
                f"parallel: wanted words and tokens over different axes for top_k, got both over {plan.gathered}"
            )
        if self.reproducible:
            return of_tiles((self,), lambda scores, _: top_k(scores, k))
        return evaluate((self,), lambda local: local.top_k(k))

    def sample(self, *, key: PRNGKeyArray, shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
        """Words drawn from the distribution of each hidden state, by the Gumbel-max trick.

        The draws depend on the key and the places of hidden state and word, not on blocks or a mesh.

        Args:
            key: of the draws.
            shape: the number of draws for each hidden state, as leading axes.

        Returns:
            `[*shape, *batch]`, int32.

        Raises:
            NotImplementedError: with `reproducible`; [`generate`][energy_attn.models.generate] draws reproducibly.
            TypeError: no key, or sizes that are no integers.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import energy_attn as ea
            >>> p = ea.Categorical(jnp.ones((2, 4)), jnp.zeros((8, 4)), mask=jnp.arange(8) == 5)
            >>> p.sample(key=jax.random.key(0), shape=(3,)).tolist()
            [[5, 5], [5, 5], [5, 5]]
        """
        checks.check_key("key", key)
        if self.reproducible:
            raise NotImplementedError("sample: wanted reproducible=False, got True")
        if self.scores is not None:
            raise NotImplementedError("sample: wanted a call outside the loss of `sum_over_tokens`")
        sizes = tuple(checks.check_integer("shape", x, 0) for x in shape)
        rows = jnp.arange(math.prod(self.hidden.shape[:-1]), dtype=jnp.int32)
        rows = rows.reshape(self.hidden.shape[:-1])
        keys = jax.random.split(key, math.prod(sizes))
        draws = lax.map(lambda key: evaluate((self,), Local.draw, rows, key), keys)
        return draws.reshape(*sizes, *rows.shape)

    def _measure(
        self, asked: Asked, *others: "Categorical", label: Array | None = None
    ) -> LayerStatistics:
        return measure((self, *map(self._fitting, others)), asked, label)

    def _of_labels(self, labels: Array) -> LayerStatistics:
        labels = check_labels(labels, self.hidden.shape[:-1], self.vocab_size)
        return self._measure(Asked(label=True), label=labels)

    def _fitting(self, other: object) -> "Categorical":
        if not isinstance(other, Categorical):
            raise TypeError(f"other: wanted a Categorical, got {checks.received(other)}")
        if len(other.weight) != len(self.weight):
            raise ValueError(
                f"other: wanted a vocabulary of {len(self.weight)} words, got {len(other.weight)}"
            )
        if other.hidden.shape[:-1] != self.hidden.shape[:-1]:
            raise ValueError(
                f"other: wanted hidden states of shape {self.hidden.shape[:-1]}, got {other.hidden.shape[:-1]}"
            )
        for name in "parallel", "reproducible":
            wanted, given = getattr(self, name), getattr(other, name)
            if given != wanted:
                raise ValueError(f"other: wanted {name}={wanted}, got {given}")
        return other


def check_labels(labels: object, shape: tuple[int, ...], size: int) -> Array:
    """Returns labels as int32; raises for another shape, and for known labels that are no words."""
    array = checks.check_integral("labels", labels)
    checks.check_shape("labels", array, shape)
    if checks.is_concrete(array):
        known = np.asarray(array)
        wrong = known[(known < 0) | (known >= size)]
        if wrong.size:
            raise ValueError(f"labels: wanted numbers from 0 to {size - 1}, got {wrong.flat[0]}")
    return jnp.asarray(checks.as_int32(array))


def _factor(name: str, x: Any, shape: tuple[int, ...], least: float = -math.inf) -> Any:
    """Returns a factor of logits: a finite number above `least`, or an array that broadcasts to `shape`."""
    if isinstance(x, (jax.Array, np.ndarray)):
        array = jnp.asarray(checks.check_floating(name, x))
        checks.check_broadcastable(name, array, shape, leading=False)
        return array
    number = checks.check_finite_number(name, x)
    if number <= least:
        raise ValueError(f"{name}: wanted a number above {least:g}, got {number}")
    return number


def at_least_zero(x: Array) -> Array:
    # only rounding makes it negative; the derivative is the derivative of `x`
    return x + lax.stop_gradient(jnp.where(x < 0, -x, 0.0))
