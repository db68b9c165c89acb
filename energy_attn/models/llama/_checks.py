"""Checks of a configuration that need more of it than one field."""

from typing import Any

from energy_attn.kernels.internal import received

from ..families._latent import LatentConfig

# `config` is a `LlamaConfig` throughout, whose module imports this one.


def check_latent(config: Any) -> None:
    """Raises `TypeError` or `ValueError` for fields that latent attention does not have, or has otherwise."""
    latent, heads = config.latent, config.num_attention_heads
    if not isinstance(latent, LatentConfig):
        raise TypeError(f"latent: wanted a LatentConfig or None, got {received(latent)}")
    wanted: dict[str, tuple[Any, ...]] = {
        "num_key_value_heads": (heads,),
        "head_dim": (None, latent.head_dim),
        "qk_norm": (False,),
        "attention_sinks": (False,),
    }
    for name, allowed in wanted.items():
        if (given := getattr(config, name)) not in allowed:
            raise ValueError(
                f"{name}: wanted {allowed[-1]} beside latent attention, got {received(given)}"
            )


def check_layers(config: Any, name: str, kinds: tuple[Any, ...]) -> None:
    """Raises `TypeError` or `ValueError` for a field that is neither None nor one of `kinds` for each layer."""
    given, count = getattr(config, name), config.num_hidden_layers
    if given is None:
        return
    if not isinstance(given, tuple):
        raise TypeError(f"{name}: wanted a tuple or None, got {received(given)}")
    if len(given) != count or any(x not in kinds for x in given):
        wanted = " or ".join(map(repr, kinds))
        raise ValueError(f"{name}: wanted {wanted} for each of {count} layers, got {given}")
