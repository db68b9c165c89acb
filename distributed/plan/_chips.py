"""Chips: the products that they compute in a second, and their memory, published by the makers."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from energy_attn.kernels.internal import (
    check_choice,
    check_finite_number,
    check_integer,
    check_text,
)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of a mesh: how fast it multiplies, and how much it holds.

    Attributes:
        network: the name of its interconnect, as [`topology`][energy_attn.distributed.cost.topology] takes it.
        flops: the peak of dense bfloat16 products, in floating-point operations per second.
        memory: bytes.
        efficiency: the part of the peak that products reach.

    Raises:
        TypeError: a number or a name of another type.
        ValueError: a rate or a memory that is not positive, or an efficiency that is not between 0 and 1.

    Examples:
        >>> from energy_attn.distributed import plan
        >>> plan.Chip("tpu_v5p", flops=459e12, memory=95 * 10**9).efficiency
        0.5
    """

    network: str
    flops: float
    memory: int
    efficiency: float = 0.5

    def __post_init__(self) -> None:
        check_text("network", self.network)
        check_integer("memory", self.memory, least=1, is_wide=True)
        if check_finite_number("flops", self.flops) <= 0:
            raise ValueError(f"flops: wanted operations per second, above 0, got {self.flops}")
        if not 0 < check_finite_number("efficiency", self.efficiency) <= 1:
            raise ValueError(
                f"efficiency: wanted a part of the peak, above 0 and at most 1, got {self.efficiency}"
            )


# Peaks and memory are the makers': Google Cloud's pages of TPU v4, v5e, v5p and v6e, and NVIDIA's data sheets of H100
# SXM and H200. Efficiencies are those of whole training steps without context parallelism that MaxText publishes
# (docs/reference/models/tiering.md, 15 June 2026): Llama 2 70B on 512 v5p, Llama 3.1 70B on 256 v6e. Others: assumed.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v4": Chip("tpu_v4", 275e12, 32 << 30),
        "v5e": Chip("tpu_v5e", 197e12, 16 * 10**9),
        "v5p": Chip("tpu_v5p", 459e12, 95 * 10**9, 0.654),
        "v6e": Chip("tpu_v6e", 918e12, 32 * 10**9, 0.503),
        "h100": Chip("dgx_h100", 989.4e12, 80 * 10**9),
        "h200": Chip("dgx_h200", 989.4e12, 141 * 10**9),
    }
)


def chip(name: str, *, efficiency: float | None = None) -> Chip:
    """The chip of a name.

    | name | dense bfloat16 products, TFLOP/s | memory | efficiency |
    |---|---|---|---|
    | `"v4"` | 275 | 32 GiB | 0.5, assumed |
    | `"v5e"` | 197 | 16 GB | 0.5, assumed |
    | `"v5p"` | 459 | 95 GB | 0.654 |
    | `"v6e"` | 918 | 32 GB | 0.503 |
    | `"h100"` | 989.4 | 80 GB | 0.5, assumed |
    | `"h200"` | 989.4 | 141 GB | 0.5, assumed |

    Args:
        name: as above.
        efficiency: the part of the peak that products reach; None: as above.

    Raises:
        TypeError: `efficiency` is no number.
        ValueError: an unknown name, or an efficiency that is not between 0 and 1.

    Source: Google Cloud's pages of TPU v4, v5e, v5p and v6e, NVIDIA's data sheets of H100 SXM and H200; efficiencies
        of whole training steps: MaxText, docs/reference/models/tiering.md, 15 June 2026.

    Examples:
        >>> from energy_attn.distributed import plan
        >>> plan.chip("v5p").flops, plan.chip("v5p", efficiency=0.4).efficiency
        (459000000000000.0, 0.4)
    """
    check_choice("name", name, tuple(CHIPS))
    found = CHIPS[name]
    return found if efficiency is None else dataclasses.replace(found, efficiency=efficiency)
