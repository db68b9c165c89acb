"""Sizes of one attention, of one device's shard, and how methods divide heads and keys."""

import dataclasses
import math

from energy_attn.kernels.internal import checks, is_static

from ._network import Topology, Transfer, Transfers

_MOST_PIECES = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    r"""The sizes of one attention, all devices together.

    Attributes:
        batch: $B$.
        queries: $T$, 1 when decoding.
        keys: $S$; device $i$ of $p$ holds $S/p$ of them.
        heads: $N$, of the queries.
        kv_heads: $K$, of keys and values; it divides `heads`.
        width: $H$, of queries and keys.
        value_width: $H_v$; None: `width`.
        dtype: the dtype of all arrays except `lse`, which is float32 (float64 for float64 arrays).
        causal: whether positions are compared: a ring then gathers the positions of all shards once.
            (With `parallel=` every device knows them, and none are sent.)
        window: the largest distances of a key before and after its query, at the positions of the layout; None: any
            distance. With a window, a ring of keys and a gather send only keys that some query may see.
        layout: the order of the sequence over the devices, as for
            [`SequenceParallel`][energy_attn.distributed.SequenceParallel].
        queries_sharded: whether queries are sharded as keys are (prefill, training), or replicated (decode).

    Raises:
        TypeError: sizes that are no integers, a dtype that is not floating, or a window of another type.
        ValueError: negative sizes, an unknown layout, no heads, or `kv_heads` that does not divide `heads`.

    Source: Tree Attention (arXiv 2408.04093), section 6.3: $b$, $N$, $n_h$, $d_h$ are `batch`,
        `keys`, `heads`, `width`; the paper's $d = d_h n_h$ for keys is here `kv_heads` · `width`.

    Examples:
        >>> from energy_attn.distributed.cost import Shape
        >>> Shape(1, 1, 640_000, 16, 16, 128).rows
        16
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    value_width: int | None = None
    dtype: str = "bfloat16"
    causal: bool = False
    queries_sharded: bool = False
    window: tuple[int, int] | None = None
    layout: str = "contiguous"

    def __post_init__(self) -> None:
        for name in ("batch", "queries", "keys", "width"):
            checks.check_integer(name, getattr(self, name), least=0, is_wide=True)
        for name in ("heads", "kv_heads"):
            checks.check_integer(name, getattr(self, name), least=1, is_wide=True)
        if self.value_width is not None:
            checks.check_integer("value_width", self.value_width, least=0, is_wide=True)
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: wanted a divisor of the {self.heads} heads, got {self.kv_heads}"
            )
        checks.check_floating_dtype("dtype", self.dtype)
        checks.check_flag("causal", self.causal)
        checks.check_flag("queries_sharded", self.queries_sharded)
        checks.check_choice("layout", self.layout, ("contiguous", "striped", "zigzag"))
        if self.window is not None:
            if not isinstance(self.window, tuple) or len(self.window) != 2:
                raise TypeError(
                    f"window: wanted two integers or None, got {checks.received(self.window)}"
                )
            for side in self.window:
                checks.check_integer("window", side, least=0, is_wide=True)

    @property
    def rows(self) -> int:
        """Queries times heads: $B T N$."""
        return self.batch * self.queries * self.heads

    @property
    def out_width(self) -> int:
        """$H_v$, by default `width`."""
        return self.width if self.value_width is None else self.value_width

    @property
    def bytes(self) -> int:
        """Bytes of one number of the arrays."""
        return checks.check_floating_dtype("dtype", self.dtype).itemsize

    @property
    def lse_bytes(self) -> int:
        """Bytes of one number of `lse`, and of sums."""
        return max(self.bytes, 4)

    @property
    def state(self) -> int:
        """Bytes of one row's state, where it is folded: $H_v + 1$ numbers of `lse`'s dtype."""
        return (self.out_width + 1) * self.lse_bytes


def check_sizes(shape: object, topology: object) -> None:
    if not isinstance(shape, Shape):
        raise TypeError(f"shape: wanted a Shape, got {checks.received(shape)}")
    if not isinstance(topology, Topology):
        raise TypeError(f"topology: wanted a Topology, got {checks.received(topology)}")


def kv_shard(shape: Shape, topology: Topology) -> tuple[int, int]:
    """Bytes of one device's keys, and bytes of its values."""
    rows = shape.batch * -(-shape.keys // topology.devices) * shape.kv_heads
    return rows * shape.width * shape.bytes, rows * shape.out_width * shape.bytes


def local_rows(shape: Shape, topology: Topology) -> int:
    shards = topology.devices if shape.queries_sharded else 1
    return shape.batch * -(-shape.queries // shards) * shape.heads


def position_gather(
    length: int, shape: Shape, topology: Topology, axes: tuple[int, ...]
) -> Transfers:
    """Initial gather of the positions of `length` tokens, if positions are compared."""
    if shape.causal:
        yield Transfer("all-gather", 4 * -(-length // topology.devices), axes)


def tangent_bytes(size: int, shape: Shape) -> int:
    """Bytes of tangents, which have `lse`'s dtype, for arrays of `size` bytes."""
    return size // shape.bytes * shape.lse_bytes


def key_copies(heads: int, kv_heads: int, devices: int) -> int | None:
    """Copies of each key head that give every device the keys of its query heads; None if these cannot be divided."""
    # p / gcd(K, p) copies of each of K heads are lcm(K, p), which has to divide N
    copies = devices // math.gcd(kv_heads, devices)
    return None if heads % (kv_heads * copies) else copies


def pieces(keys: int) -> int:
    """Number of equal pieces, at most 8, in which a device's keys are gathered."""
    if not is_static(keys):  # a symbol of `jax.export.symbolic_shape`
        return 1
    return next(n for n in range(min(keys, _MOST_PIECES) or 1, 0, -1) if keys % n == 0)


def halves(keys: int) -> int:
    """Runs of a device's keys in one piece: 2 if both halves of its keys can be divided, else 1."""
    # two runs in each piece balance causal work in the order "zigzag"
    count = pieces(keys)
    return 2 if count > 1 and keys % (2 * count) == 0 else 1
