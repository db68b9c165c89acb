"""Generation: the gain of drafting for the library's small model on real text."""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from energy_attn.distributed import SequenceParallel, make_mesh

from ...models import AbstractDrafter, Generation, Llama, ModelDrafter, PromptLookup, generate
from .._byte_llama import byte_llama, held_out_text
from ._cases import OURS, Run

PLAIN = "a token at a time"
MODEL = "drafts by a smaller model"

DRAFT = Path(__file__).parent / "model"  # examples/byte_llama trains it


class Models(NamedTuple):
    """The library's model of bytes, a smaller one to draft with, and held-out text."""

    model: Llama
    small: Llama
    text: np.ndarray


@functools.cache
def read_models() -> Models:
    """Both models; raises `FileNotFoundError` where Python comes without its sources."""
    return Models(byte_llama(), Llama.load(DRAFT, progress=False), held_out_text())


class Continuation(NamedTuple):
    """Greedy continuations of passages of a text, by several drafters.

    Attributes:
        prompts: number of passages.
        prompt: bytes of each prompt.
        new: bytes to generate for each.
        devices: number that the cache is sharded over.
    """

    prompts: int
    prompt: int
    new: int
    devices: int
    name: str = "generate"
    dtype: str = "float32"

    @property
    def sizes(self) -> str:
        """The sizes, in short."""
        return f"B={self.prompts}, T={self.prompt}+{self.new}, devices={self.devices}"

    def about(self) -> dict[str, Any]:
        """The sizes, and the gain of each drafter; raises as `sides`."""
        sizes = {name: x for name, x in self._asdict().items() if isinstance(x, int)}
        found = {name: self._generate(drafter) for name, drafter in self._drafters().items()}
        return {
            "dtype": self.dtype,
            "shape": sizes,
            "tokens_per_pass": {n: round(float(x.tokens_per_pass), 3) for n, x in found.items()},
            "acceptance_rate": {n: round(float(x.acceptance_rate), 3) for n, x in found.items()},
        }

    def shrunk(self, by: int) -> "Continuation":
        """The case with shorter prompts and fewer new bytes."""
        return self._replace(prompt=max(self.prompt // by, 4), new=max(self.new // by, 4))

    def sides(self, platform: str) -> tuple[dict[str, Run], dict[str, str]]:
        """Ours, which looks drafts up in the text, and the others; none is absent.

        Raises `FileNotFoundError` where Python comes without its sources, `ValueError` for too few
        devices.
        """
        del platform
        runs: dict[str, Run] = {
            name: functools.partial(self._tokens, drafter)
            for name, drafter in self._drafters().items()
        }
        return runs, {}

    def _drafters(self) -> dict[str, AbstractDrafter | None]:
        small = read_models().small
        return {
            OURS: PromptLookup(ngram=4, candidates=1, length=4),
            PLAIN: None,
            MODEL: ModelDrafter(small, length=2, nodes=4),
        }

    def _tokens(self, drafter: AbstractDrafter | None) -> Array:
        return self._generate(drafter).tokens

    def _generate(self, drafter: AbstractDrafter | None) -> Generation:
        models = read_models()
        step = (len(models.text) - self.prompt) // self.prompts
        index = np.arange(self.prompts)[:, None] * step + np.arange(self.prompt)
        tokens = jnp.asarray(models.text[index], jnp.int32)
        options = {"drafter": drafter, "eos_token_id": ()}  # the same number of tokens for each
        if self.devices == 1:
            return generate(models.model, tokens, self.new, **options)
        with jax.set_mesh(make_mesh((self.devices,), ("device",))):
            parallel = SequenceParallel("device")
            return generate(models.model, tokens, self.new, parallel=parallel, **options)


CONTINUATIONS = (
    Continuation(1, 384, 128, devices=1),
    Continuation(4, 384, 128, devices=1),
    Continuation(1, 384, 128, devices=8),
)
