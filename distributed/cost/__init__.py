r"""The cost of an attention over a mesh, predicted: bytes sent, memory, seconds.

[`transfers`][energy_attn.distributed.cost.transfers] predicts the collectives of the program;
[`collectives`][energy_attn.distributed.collectives] reads those of a compiled one, and tests
compare the two. `volume` and `latency` follow from the predicted ones, and `merge="auto"` and
`method="auto"` choose by them.

The model does not know how well a collective overlaps with computation, congestion, other users of
a network, or the real speed of any machine. A compiled program holds no price of communication,
either. So the times rank strategies and are no measure of speed: exchanges measured over an emulated
network took 1.1 to 3.4 times as long, and those of one ring 0.7 to 0.8.

Examples:
    >>> from energy_attn.distributed import cost
    >>> shape = cost.Shape(batch=1, queries=1, keys=640_000, heads=32, kv_heads=8, width=128)
    >>> cost.choose_method(shape, cost.dgx_h100(nodes=16))
    'tree'
"""

from ..merge._strategies import MERGES as MERGES
from ..network._shape import Shape as Shape
from ..network._topology import Link as Link
from ..network._topology import Topology as Topology
from ..network._topology import dgx_h100 as dgx_h100
from ..network._topology import ethernet as ethernet
from ..network._topology import mi300x as mi300x
from ..network._topology import rtx_4090 as rtx_4090
from ..network._topology import simulated as simulated
from ..network._topology import topology_of as topology_of
from ..network._topology import tpu as tpu
from ..network._transfer import Transfer as Transfer
from ._cost import choose_merge as choose_merge
from ._cost import choose_method as choose_method
from ._cost import latency as latency
from ._cost import memory as memory
from ._cost import volume as volume
from ._transfers import ROTATED as ROTATED
from ._transfers import transfers as transfers
