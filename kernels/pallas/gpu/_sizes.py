"""The user's sizes for the GPU kernels: tiles, warps, stages and programs, and the calls that they are for."""

import dataclasses
from typing import Literal, get_args

from ..._checks import check_choice, check_flag, check_integer, received

KernelKind = Literal["forward", "query", "key", "tangent"]
KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
# Not 8 bits: Pallas computes offsets in signed 32 bits for arrays of up to 2^32 bytes, here as many numbers.
DTYPES = ("float16", "bfloat16", "float32")
LEAST = 16  # the smallest tile that tensor cores take
FEW_KEYS = 16384  # of a short cache
MOST_ROWS = 256  # stands for all calls of more than half as many rows


def power(size: int) -> int:
    """The least power of two that holds `size`."""
    return max(LEAST, 1 << (size - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class GPUTiles:
    r"""How one of the GPU kernels cuts a call into tiles and programs, and which calls it so cuts.

    A row is a query of one head, and $T N / K$ rows share a key head. A program keeps a tile of `rows` and
    iterates over tiles of `keys`; that of the gradients in keys and values keeps `keys` and iterates over `rows`.

    Attributes:
        kind: the kernel: `"forward"` of the state, `"query"` of the gradient in queries, `"key"` of those in
            keys and values, `"tangent"` of the state's derivative in a direction.
        rows: of a tile; a power of two, at least 16. Fewer where a call has fewer.
        keys: of a tile; likewise.
        warps: the threads of a program in units of 32: 1, 2, 4, 8 or 16.
        stages: the number of steps of an iteration that overlap, 1 to 8, whose tiles are in shared memory.
        programs: where a call has fewer tiles to keep, the iteration of each is split over several programs,
            up to this number in all, and their parts are merged.
        least_steps: the least number of tiles that each of these iterates over.
        device: the kind of device, as in `jax.Device.device_kind`, of programs that this is for; None: any.
        dtype: `"float16"`, `"bfloat16"` or `"float32"`: of queries, keys and values; None: any.
        width: of queries and keys; None: any.
        value_width: of values; None: any.
        call_rows: the rows of a key head, up to a power of two: 16, 32, 64, 128, or 256 for all calls
            of more than 128; None: any.
        score: True for calls with a score, False for calls without; None: any.
        few_keys: True for calls of at most 16384 keys, False for calls of more; None: any.

    Raises:
        TypeError: a field of another type.
        ValueError: an unknown kind or dtype, or a size that the kernels cannot have.

    Source: the tiles are those of FlashAttention-2 (arXiv 2307.08691); the split of an iteration is
        Flash-Decoding's.

    Examples:
        >>> from energy_attn.kernels import GPUTiles
        >>> GPUTiles("forward", rows=128, keys=64, warps=8, stages=3).programs
        132
    """

    kind: KernelKind
    rows: int
    keys: int
    warps: int = 4
    stages: int = 2
    programs: int = 132
    least_steps: int = 4
    device: str | None = None
    dtype: str | None = None
    width: int | None = None
    value_width: int | None = None
    call_rows: int | None = None
    score: bool | None = None
    few_keys: bool | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        _check_power("rows", self.rows, LEAST, 1024)
        _check_power("keys", self.keys, LEAST, 1024)
        _check_power("warps", self.warps, 1, 16)
        if check_integer("stages", self.stages, least=1) > 8:
            raise ValueError(f"stages: wanted at most 8, got {self.stages}")
        check_integer("programs", self.programs, least=1)
        check_integer("least_steps", self.least_steps, least=1)
        if not (self.device is None or isinstance(self.device, str)):
            raise TypeError(f"device: wanted a name or None, got {received(self.device)}")
        check_choice("dtype", self.dtype, (*DTYPES, None))
        for name in ("width", "value_width"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), least=1)
        if self.call_rows is not None:
            _check_power("call_rows", self.call_rows, LEAST, MOST_ROWS)
        for name in ("score", "few_keys"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))


@dataclasses.dataclass(frozen=True)
class GPUPlan:
    """The tiles of the GPU kernels, for `PallasGPU(plan)`.

    A kernel uses the first tiles whose fields fit the call; if there are none, the library chooses by shapes.

    Attributes:
        tiles: a tuple of [`GPUTiles`][energy_attn.kernels.GPUTiles].

    Raises:
        TypeError: `tiles` is no such tuple.

    Source: none: see [`GPUTiles`][energy_attn.kernels.GPUTiles].

    Examples:
        >>> import jax
        >>> from energy_attn.kernels import GPUPlan, GPUTiles, PallasGPU, local_attention
        >>> plan = GPUPlan((GPUTiles("forward", rows=16, keys=16, stages=3),))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 20, 2, 16))
        >>> local_attention(q, k, v, implementation=PallasGPU(plan)).lse.shape  # interpreted on a CPU
        (1, 20, 2)
    """

    tiles: tuple[GPUTiles, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.tiles, tuple) or not all(
            isinstance(x, GPUTiles) for x in self.tiles
        ):
            raise TypeError(f"tiles: wanted a tuple of GPUTiles, got {received(self.tiles)}")

    def find(self, kind: KernelKind, **call: str | int | bool | None) -> GPUTiles | None:
        """The first tiles whose fields are all None or equal to those of the call; None if there are none."""
        for tiles in self.tiles:
            wanted = {name: getattr(tiles, name) for name in call}
            if tiles.kind == kind and all(
                x is None or x == call[name] for name, x in wanted.items()
            ):
                return tiles
        return None


def _check_power(name: str, x: object, least: int, most: int) -> None:
    size = check_integer(name, x)
    if not least <= size <= most or size & (size - 1):
        raise ValueError(f"{name}: wanted a power of two from {least} to {most}, got {size}")
