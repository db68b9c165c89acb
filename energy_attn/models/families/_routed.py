"""What families with routed MLPs share: the fields of their files, and how experts lie in them."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..checkpoint._config import renaming
from ..decoder._stored import Stored
from ._experts import ExpertsConfig

# Of no effect on logits: losses of training, and what is returned beside logits.
TRAINING = ("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
# It decides between experts that are nearly as good: files of 16 bits have it in 32.
_CORRECTION = "e_score_correction_bias"
_EXPERT = re.compile(r"(.*)\.experts\.(gate_proj|up_proj|down_proj)")


class ExpertFields(NamedTuple):
    """The fields of a file that describe experts: by the name in an `ExpertsConfig`, theirs and its default there."""

    fields: Mapping[str, tuple[str, Any]]

    @property
    def names(self) -> tuple[str, ...]:
        """The names in a file."""
        return tuple(name for name, _ in self.fields.values())

    def read(self, values: Mapping[str, Any], **fixed: int | str) -> ExpertsConfig:
        """The experts of a file, with what all of the family have."""
        found: dict[str, Any] = dict(fixed)
        found |= {name: values.get(theirs, x) for name, (theirs, x) in self.fields.items()}
        with renaming({name: theirs for name, (theirs, _) in self.fields.items()}):
            return ExpertsConfig(**found)

    def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the file of a `LlamaConfig` with these attributes."""
        experts = values["experts"]
        if experts is None:
            return {}
        return {theirs: getattr(experts, name) for name, (theirs, _) in self.fields.items()}


def each_expert(
    names: Mapping[str, str], prefix: Callable[[str], str] = str
) -> Callable[[Any, str, tuple[int, ...]], Stored]:
    """Stacked weights of experts from a tensor for each, where a projection has the name in `names`."""

    def stored(config: Any, name: str, shape: tuple[int, ...]) -> Stored:
        del config
        match = _EXPERT.fullmatch(name)
        if match is None:
            kind = np.dtype(np.float32) if name.endswith(_CORRECTION) else None
            return Stored((prefix(name),), dtype=kind)
        path, part = prefix(match[1]), names.get(match[2], match[2])
        each = tuple(f"{path}.experts.{i}.{part}.weight" for i in range(shape[0]))
        return Stored(each, is_split=True)

    return stored
