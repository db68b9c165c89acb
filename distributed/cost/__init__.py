r"""The cost of an attention over a mesh, predicted: bytes sent, memory, seconds.

[`transfers`][energy_attn.distributed.cost.transfers] predicts the collectives of the program;
[`collectives`][energy_attn.distributed.collectives] reads the collectives of a compiled program, and tests
compare the two. `volume` and `latency` follow from the prediction, and `merge="auto"` and
`method="auto"` choose by it.

[`plan.step_time`][energy_attn.distributed.plan.step_time] adds the products of the busiest device, and counts
which transfers overlap them. The model ignores congestion, other users of a network, and the real speed of a
machine. Exchanges by gloo, measured over an emulated
network of known latency and bandwidth, agree with the model within a factor of 1.5 where cores were idle (of 3.1
where cores were busy). Transfers of GPUs and TPUs have not been measured: there its times only rank strategies.

Examples:
    >>> from energy_attn.distributed import cost
    >>> shape = cost.Shape(batch=1, queries=1, keys=640_000, heads=32, kv_heads=8, width=128)
    >>> cost.choose_method(shape, cost.topology("dgx_h100", (8,), nodes=16))
    'tree'
"""

import typing as _typing

from energy_attn.kernels.internal import lazy as _lazy

from ._interconnects import topology as topology
from ._network import Link as Link
from ._network import Topology as Topology
from ._shape import Shape as Shape

# Methods and merge strategies describe their transfers by the names above, so their own cost is imported later.
if _typing.TYPE_CHECKING:
    from ..methods._choice import choose_merge as choose_merge
    from ..methods._choice import choose_method as choose_method
    from ..plan._cost import latency as latency
    from ..plan._cost import memory as memory
    from ..plan._cost import transfers as transfers
    from ..plan._cost import volume as volume
else:
    __getattr__, __dir__ = _lazy(
        __name__,
        names={
            "choose_merge": "..methods._choice",
            "choose_method": "..methods._choice",
            "latency": "..plan._cost",
            "memory": "..plan._cost",
            "transfers": "..plan._cost",
            "volume": "..plan._cost",
        },
    )
