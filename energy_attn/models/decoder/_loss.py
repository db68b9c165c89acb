"""Log-probabilities and losses of a decoder, from the distribution of its output layer."""

import math
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from energy_attn import Categorical, VocabularyParallel, attention, softmax_cross_entropy
from energy_attn.distributed import SequenceParallel
from energy_attn.distributed.internal import check_mesh, is_explicit
from energy_attn.kernels.internal import call_policy, checks

from ...functional._by_rows import rows_of
from ._cache import log_probabilities
from ._images import Images, check_images
from ._read import AbstractLayers, read_alone


class LossOptions(TypedDict, total=False):
    """Options of [`AbstractDecoder.loss`][energy_attn.models.AbstractDecoder.loss]."""

    label_smoothing: float
    """The share of the uniform distribution, from 0 to 1."""

    z_loss: float
    """The factor of the square of the log-partition function."""


class AbstractLanguageModel(AbstractLayers):
    """A decoder's distributions of next tokens: methods of `AbstractDecoder`."""

    config: eqx.AbstractVar[Any]  # an `AbstractDecoderConfig`

    def output(
        self,
        x: Float[Array, "batch time width"],
        parallel: VocabularyParallel | None = None,
        reproducible: bool = False,
    ) -> Categorical | None:
        """The distribution of the next token that normed hidden states give, without logits; None if there is none."""
        del x, parallel, reproducible
        return None

    def distribution(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "#batch time"] | None = None,
        *,
        parallel: SequenceParallel | None = None,
        reproducible: bool = False,
        attend: Callable[..., Any] = attention,
        images: Images | None = None,
    ) -> Categorical:
        """The distribution of the token after each of `tokens`, without logits.

        For losses over the whole vocabulary: divergences from a reference model or a teacher, and entropies. Over a
        mesh tokens are sharded as in a call, and the vocabulary over the axes `heads` of `parallel`.

        Args:
            tokens, positions, parallel, attend, images: as in a call.
            reproducible: as in a call, and in [`Categorical`][energy_attn.Categorical].

        Returns:
            A [`Categorical`][energy_attn.Categorical] for each token, `[batch, time]`.

        Raises:
            NotImplementedError: the decoder has no [`output`][energy_attn.models.AbstractDecoder.output].
            TypeError, ValueError: as a call does.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> from energy_attn.models import Llama, LlamaConfig
            >>> config = LlamaConfig(16, 32, 64, num_hidden_layers=1, num_attention_heads=4)
            >>> policy, reference = (Llama(config, key=jax.random.key(x)) for x in range(2))
            >>> text = jnp.array([[3, 1, 4, 1, 5, 9]])
            >>> p, q = policy.distribution(text), reference.distribution(text)
            >>> p.kl_divergence(q).shape
            (1, 6)
        """
        check_images(images, tokens, None)
        policy = call_policy(None, reproducible)
        x, _ = read_alone(self, tokens, positions, parallel, policy, attend, images)
        over = _vocabulary_parallel(self.config.vocab_size, x, parallel)
        found = self.output(x, over, reproducible)
        if found is None:
            raise NotImplementedError(
                f"wanted a decoder with a method output, got {type(self).__name__}"
            )
        return found

    def log_probs(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "#batch time"] | None = None,
        *,
        parallel: SequenceParallel | None = None,
        reproducible: bool = False,
        attend: Callable[..., Any] = attention,
        images: Images | None = None,
    ) -> Float[Array, "batch time-1"]:
        r"""$\log P(x_{t+1} \mid x_0 \dots x_t)$ of each token but the first, in nats.

        With `reproducible` they equal, bit for bit, the log-probabilities that
        [`generate`][energy_attn.models.generate] returns for the same text, on any mesh: in on-policy training, the
        ratio of the policy to the one that was sampled from is exactly 1 before the first update. Their gradients
        are bitwise reproducible on any mesh, too.

        Arguments and errors are those of a call.

        Returns:
            `[batch, time - 1]`, in float32, or float64 where the weights are.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> from energy_attn.models import Llama, LlamaConfig, generate
            >>> config = LlamaConfig(16, 32, 64, num_hidden_layers=1, num_attention_heads=4)
            >>> model = Llama(config, key=jax.random.key(0))
            >>> prompt, exact = jnp.array([[3, 1, 4]]), {"reproducible": True}
            >>> said = generate(model, prompt, 5, return_logprobs=True, **exact)
            >>> text = jnp.concatenate([prompt, said.tokens], 1)
            >>> bool((model.log_probs(text, **exact)[:, 2:] == said.logprobs).all())
            True
        """
        check_images(images, tokens, None)
        policy = call_policy(None, reproducible)
        x, _ = read_alone(self, tokens, positions, parallel, policy, attend, images)
        layer = (
            None
            if reproducible
            else self.output(x, _vocabulary_parallel(self.config.vocab_size, x, parallel))
        )
        if layer is None:
            rows, labels = rows_of(policy), checks.as_int32(tokens)

            def of_rows(x: Array, labels: Array) -> Array:
                return log_probabilities(self.logits(x), labels)

            return rows(of_rows, x[:, :-1], labels[:, 1:])
        # the labels of all hidden states, whose number devices divide; the last has none
        return layer.log_prob(jnp.roll(checks.as_int32(tokens), -1, 1))[:, :-1]

    def loss(
        self,
        tokens: Int[Array, "batch time"],
        positions: Int[Array, "#batch time"] | None = None,
        *,
        weights: Float[Array, "#batch time-1"] | None = None,
        parallel: SequenceParallel | None = None,
        reproducible: bool = False,
        attend: Callable[..., Any] = attention,
        images: Images | None = None,
        **options: Unpack[LossOptions],
    ) -> Float[Array, ""]:
        r"""The mean cross-entropy of each token but the first with its predecessors, in nats.

        Without an array of logits, in the value and in its gradient: see
        [`softmax_cross_entropy`][energy_attn.softmax_cross_entropy]. Over a mesh tokens are sharded as in a call, and
        the vocabulary over the axes `heads` of `parallel`, as [`shard`][energy_attn.models.shard] places it.

        Args:
            tokens, positions, parallel, reproducible, attend, images: as in `distribution`.
            weights: of the tokens but the first, broadcastable to `[batch, time - 1]`; None: all are 1. Tokens of an
                image are usually given 0.
            **options: `label_smoothing` and `z_loss`, as in `softmax_cross_entropy`.

        Returns:
            A number, in float32, or float64 where the weights are.

        Raises:
            NotImplementedError: as `distribution` does.
            TypeError: as a call does.
            ValueError: as a call does, or a token that is known to be outside the vocabulary.

        Examples:
            >>> import equinox as eqx, jax, jax.numpy as jnp
            >>> from energy_attn.models import Llama, LlamaConfig
            >>> config = LlamaConfig(16, 32, 64, num_hidden_layers=1, num_attention_heads=4)
            >>> model = Llama(config, key=jax.random.key(0))
            >>> text = jnp.array([[3, 1, 4, 1, 5, 9]])
            >>> value, slope = eqx.filter_value_and_grad(lambda model: model.loss(text))(model)
            >>> bool(jnp.allclose(value, -model.log_probs(text).mean()))
            True
        """
        options_of: Any = {"parallel": parallel, "reproducible": reproducible, "attend": attend}
        p = self.distribution(tokens, positions, images=images, **options_of)
        labels = jnp.roll(checks.as_int32(tokens), -1, 1)
        counts = jnp.ones((1, labels.shape[1] - 1)) if weights is None else weights
        counts = jnp.pad(counts, ((0, 0), (0, 1)))  # the last token has no label
        names = "bias", "mask", "scale", "temperature", "soft_cap", "parallel", "reproducible"
        of_layer: Any = {name: getattr(p, name) for name in names}
        return softmax_cross_entropy(
            p.hidden, p.weight, labels, weights=counts, **of_layer, **options
        )


def _vocabulary_parallel(
    words: int, x: Array, parallel: SequenceParallel | None
) -> VocabularyParallel | None:
    """How the output layer is sharded where tokens are sharded as `parallel` says."""
    if parallel is None:
        return None
    check_mesh(parallel)
    mesh: Any = jax.sharding.get_abstract_mesh()
    if is_explicit(mesh, parallel.batch + parallel.axes + parallel.heads):
        return None  # types say it

    def fitting(axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        return axes if axes and size % math.prod(mesh.shape[x] for x in axes) == 0 else ()

    over = fitting(parallel.heads, words)
    sizes = zip((parallel.batch, parallel.axes), x.shape, strict=False)
    return VocabularyParallel(over, jax.P(*(fitting(axes, size) or None for axes, size in sizes)))
