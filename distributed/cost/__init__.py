r"""The cost of an attention over a mesh, predicted: bytes sent, memory, seconds.

[`transfers`][energy_attn.distributed.cost.transfers] predicts the collectives of the program;
[`collectives`][energy_attn.distributed.collectives] reads those of a compiled one, and tests
compare the two. `volume` and `latency` follow from the predicted ones, and `merge="auto"` and
`method="auto"` choose by them.

[`step_time`][energy_attn.distributed.cost.step_time] adds the products of the busiest device, and which
transfers lie beside them. The model does not know congestion, other users of a network, or the real speed of any
machine. A compiled program holds no price of communication, either. Exchanges by gloo, measured over an emulated
network of known latency and bandwidth, agree with the model within a factor of 1.5 where cores were idle (of 3.1
where they were busy). Transfers of GPUs and TPUs have not been measured: there its times only rank strategies.

Examples:
    >>> from energy_attn.distributed import cost
    >>> shape = cost.Shape(batch=1, queries=1, keys=640_000, heads=32, kv_heads=8, width=128)
    >>> cost.choose_method(shape, cost.topology("dgx_h100", (8,), nodes=16))
    'tree'
"""

from ..merge._strategies import MERGES as MERGES
from ._chips import Chip as Chip
from ._chips import chip as chip
from ._cost import choose_merge as choose_merge
from ._cost import choose_method as choose_method
from ._cost import latency as latency
from ._cost import memory as memory
from ._cost import volume as volume
from ._devices import topology_of_mesh as topology_of_mesh
from ._interconnects import topology as topology
from ._methods import ROTATED as ROTATED
from ._methods import transfers as transfers
from ._pairs import pairs as pairs
from ._shape import Shape as Shape
from ._step import StepTime as StepTime
from ._step import step_time as step_time
from ._topology import Link as Link
from ._topology import Topology as Topology
from ._transfer import Transfer as Transfer
