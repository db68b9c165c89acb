"""A family of decoders, as the `model_type` of a checkpoint names it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ._config import AbstractDecoderConfig
from ._decoder import AbstractDecoder


class Family(NamedTuple):
    """The functions that read the checkpoints of one `model_type`.

    Attributes:
        read: returns the configuration that the fields of a `config.json` describe; raises
            `TypeError` or `ValueError` for what the family does not compute.
        build: returns the decoder of a configuration, called as `build(config, key=key)`.
    """

    read: Callable[[Mapping[str, Any]], AbstractDecoderConfig]
    build: Callable[..., AbstractDecoder]
