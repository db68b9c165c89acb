r"""The time of an attention over a mesh of named chips, planned before anything runs.

[`step_time`][energy_attn.distributed.plan.step_time] adds the products of the busiest device to what
[`cost.transfers`][energy_attn.distributed.cost.transfers] predicts, and counts which transfers they overlap.
`python -m energy_attn plan` prints it for a model.

Examples:
    >>> from energy_attn.distributed import cost, plan
    >>> shape = cost.Shape(1, 2**17, 2**17, 32, 8, 128, causal=True, queries_sharded=True)
    >>> mesh, chip = cost.topology("tpu_v5p", (16,)), plan.chip("v5p")
    >>> sum(plan.pairs("ring", shape, mesh)) > sum(plan.pairs("ulysses", shape, mesh))
    True
"""

from ._step import Chip as Chip
from ._step import chip as chip
from ._step import pairs as pairs
from ._step import step_time as step_time
