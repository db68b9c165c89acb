"""Images in the text of a decoder: which tokens are of one image, and their embeddings."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from energy_attn.kernels.internal import checks, may_meet
from energy_attn.kernels.masks import Causal, Interval, Spans

from ._cache import DecoderCache
from ._config import check_type


class Images(eqx.Module):
    """The images in a text: tokens of one image see each other in both directions, and text is causal.

    In layers with a window, keys are also in it, as in transformers from 5.13 on. Embeddings come from a vision tower
    outside of this library.

    Args:
        ids: integers by position in the text, `[B, L]` or `[L]`, as transformers' `token_type_ids`: 0 for text, and
            equal positive numbers for successive tokens of an image. Positions past the end are text.
        embeddings: `[B, T, D]`, for the tokens read, in the place of the scaled embeddings of tokens that are of an
            image; None: the model's own for all.

    Raises:
        TypeError: ids that are no integers, or embeddings that are not floating.
        ValueError: ids of another rank.

    Source: Gemma 3 (arXiv 2503.19786), section 2.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn import models
        >>> config = models.LlamaConfig(16, 8, 16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = models.Llama(config, key=jax.random.key(0))
        >>> images = models.Images(jnp.array([0, 1, 1, 0]), jnp.ones((1, 4, 8)))
        >>> model(jnp.zeros((1, 4), int), images=images).logits.shape
        (1, 4, 16)
    """

    spans: Spans
    embeddings: Float[Array, "batch time width"] | None

    def __init__(
        self,
        ids: Int[Array | np.ndarray, "*batch length"],
        embeddings: Float[Array, "batch time width"] | None = None,
    ) -> None:
        self.spans = Spans(ids)
        if embeddings is not None:
            checks.check_floating("embeddings", embeddings)
        self.embeddings = embeddings

    def put(self, x: Array, positions: Array) -> Array:
        """Embeddings `[B, T, D]` of tokens at positions `[B or 1, T]`, in which images have their own."""
        if self.embeddings is None:
            return x
        missing = x.shape[1] - self.embeddings.shape[1]  # tokens that fill the last device
        embeddings = jnp.pad(self.embeddings, ((0, 0), (0, missing), (0, 0))).astype(x.dtype)
        spans = jax.tree.map(lambda ids: ids if ids.ndim == 2 else ids[None], self.spans)
        one = Interval(positions, positions)
        # a position that sees itself by the mask of images is in one
        return jnp.where(may_meet(spans, one, one)[..., None], embeddings, x)


def check_images(images: Images | None, tokens: Array, cache: DecoderCache | None) -> None:
    """Raises `TypeError` or `ValueError` for images that do not fit the tokens, or with a fork of a cache."""
    if images is None:
        return
    check_type("images", images, Images, "an Images or None")
    if images.embeddings is not None:
        shape = *tokens.shape, "width"
        checks.check_shape("images.embeddings", images.embeddings, shape)
    if cache is not None:
        cache.unforked("images")


def check_one_chunk(images: Images | None, time: int, chunk_size: int) -> None:
    """Raises `ValueError` for a prompt with images in several chunks."""
    # keys of an image that are in a later chunk would be hidden
    if images is not None and chunk_size < time:
        raise ValueError(
            f"chunk_size: wanted at least the {time} tokens of a prompt with images, got {chunk_size}"
        )


def seen_causally(
    images: Images | None, window: tuple[int | None, int | None] | None
) -> dict[str, Any]:
    """The options of attention in a layer with this window, causal but inside images."""
    if images is None:
        # without a window none is passed, so that `attend=` may have one of its own
        return {"is_causal": True} | ({} if window is None else {"local_window_size": window})
    before = None if window is None else (window[0], None)  # images end after a query
    return {"mask": Causal() | images.spans, "local_window_size": before}
