"""Chips: the products that they compute in a second, and their memory."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from energy_attn.kernels.internal import check_finite_number, check_integer


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device of a mesh: how fast it multiplies, and how much it holds.

    Attributes:
        network: the name of its interconnect, as [`topology`][energy_attn.distributed.cost.topology] takes it.
        flops: the peak of dense bfloat16 products, in floating-point operations per second.
        memory: bytes.
        efficiency: the part of the peak that products reach.

    Raises:
        TypeError: a number of another type.
        ValueError: a rate or a memory that is not positive, or an efficiency that is not between 0 and 1.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> cost.CHIPS["v5p"].flops
        459000000000000.0
    """

    network: str
    flops: float
    memory: int
    efficiency: float = 0.5

    def __post_init__(self) -> None:
        check_integer("memory", self.memory, least=1)
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
