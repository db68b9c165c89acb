"""Generation: what drafting ahead brings for the library's small model on real text."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from energy_attn.distributed import SequenceParallel, make_mesh

from ...models import AbstractDrafter, Generation, Llama, ModelDrafter, PromptLookup, generate
from ..demo._model import byte_llama
from ..demo._text import standard_library
from ..demo._train import CONFIG, SHORT, train
from ._cases import OURS, Run

PLAIN = "a token at a time"
MODEL = "drafts by a smaller model"

_SMALL = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=192, num_hidden_layers=1)
_SECONDS = 30.0  # of training the smaller model
_STEPS = 2000  # at most


class Models(NamedTuple):
    """The library's model of bytes and a smaller one, trained, and bytes that they have not seen."""

    model: Llama
    small: Llama
    text: np.ndarray


@functools.cache
def trained(seconds: float) -> Models:
    """Reads the one and trains the other. Raises `FileNotFoundError` where Python's sources are not."""
    text = standard_library()
    small = train(text.train, 1, _STEPS, seconds, _SMALL, stages=SHORT).model
    return Models(byte_llama(), small, text.held_out)


class Continuation(NamedTuple):
    """Greedy continuations of places in a text, by several drafters.

    Attributes:
        prompts: how many places.
        prompt: bytes of each prompt.
        new: bytes to generate for each.
        devices: how many the cache is spread over.
        seconds: of training the smaller model.
    """

    prompts: int
    prompt: int
    new: int
    devices: int
    seconds: float = _SECONDS
    name: str = "generate"
    dtype: str = "float32"

    @property
    def sizes(self) -> str:
        """The sizes, in short."""
        return f"B={self.prompts}, T={self.prompt}+{self.new}, devices={self.devices}"

    def about(self) -> dict[str, Any]:
        """The sizes, and what each drafter's passes brought. Raises what `sides` does."""
        sizes = {name: x for name, x in self._asdict().items() if isinstance(x, int)}
        found = {name: self._generate(drafter) for name, drafter in self._drafters().items()}
        return {
            "dtype": self.dtype,
            "shape": sizes,
            "trained_s": self.seconds,
            "tokens_per_pass": {n: round(float(x.tokens_per_pass), 3) for n, x in found.items()},
            "acceptance_rate": {n: round(float(x.acceptance_rate), 3) for n, x in found.items()},
        }

    def shrunk(self, by: int) -> "Continuation":
        """Shorter prompts, fewer bytes, and less training. Raises nothing."""
        shorter = {"prompt": max(self.prompt // by, 4), "new": max(self.new // by, 4)}
        return self._replace(**shorter, seconds=self.seconds / by)

    def sides(self, platform: str) -> tuple[dict[str, Run], dict[str, str]]:
        """Ours, which looks drafts up in the text, and the others; none is absent.

        Raises `FileNotFoundError` where Python's sources are not, `ValueError` for too few devices.
        """
        del platform
        runs: dict[str, Run] = {
            name: functools.partial(self._tokens, drafter)
            for name, drafter in self._drafters().items()
        }
        return runs, {}

    def _drafters(self) -> dict[str, AbstractDrafter | None]:
        small = trained(self.seconds).small
        return {
            OURS: PromptLookup(ngram=4, candidates=1, length=4),
            PLAIN: None,
            MODEL: ModelDrafter(small, length=2, nodes=4),
        }

    def _tokens(self, drafter: AbstractDrafter | None) -> Array:
        return self._generate(drafter).tokens

    def _generate(self, drafter: AbstractDrafter | None) -> Generation:
        models = trained(self.seconds)
        step = (len(models.text) - self.prompt) // self.prompts
        places = np.arange(self.prompts)[:, None] * step + np.arange(self.prompt)
        tokens = jnp.asarray(models.text[places], jnp.int32)
        options = {"drafter": drafter, "eos_token_id": ()}  # as many tokens for each
        if self.devices == 1:
            return generate(models.model, tokens, self.new, **options)
        with jax.set_mesh(make_mesh((self.devices,), ("device",))):
            spread = SequenceParallel("device")
            return generate(models.model, tokens, self.new, parallel=spread, **options)


CONTINUATIONS = (
    Continuation(1, 384, 128, devices=1),
    Continuation(4, 384, 128, devices=1),
    Continuation(1, 384, 128, devices=8),
)
