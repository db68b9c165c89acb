"""The stacked weights of experts, in whatever form a family has them."""

import equinox as eqx


class AbstractExperts(eqx.Module):
    """Weights of experts, stacked along their first axis; a dataclass without an `__init__` of its own.

    `axis` is the mesh axis that the experts are sharded over, which [`shard`][energy_attn.models.shard] sets, or None.
    """

    axis: eqx.AbstractVar[str | None]
