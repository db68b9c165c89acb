"""The collectives of a compiled program, read from its optimised HLO."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, get_args

import jax

from energy_attn.kernels.internal import checks

from ._groups import Groups, groups_of
from ._parse import Instruction, Kind, Module, arrays, parse, trip_count

_BRANCHES = "branch_computations", "true_computation", "false_computation"
_KINDS: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
# Between TPU slices, a runtime on the hosts performs collectives: XLA prints a `send` to that runtime, whose
# attributes hold the collective and its members.
_MEGASCALE: dict[str, Kind] = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}
# Custom calls that compute products.
_KERNELS = ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu", "__cublas")


@dataclasses.dataclass(frozen=True)
class Collective:
    r"""One collective operation of a compiled program.

    Attributes:
        kind: the operation, as HLO names it; an asynchronous pair (`-start`, `-done`) is one.
        bytes: payload: the bytes of its operands on one device, each time that it runs, without
            the padding of layouts. For an all-gather the shard of one device (the result is `group_size` times as
            large), for a reduce-scatter the whole array (the result is 1/`group_size` of it), for an all-to-all
            the whole array of one device. A ring all-reduce over $p$ devices sends $2 \frac{p-1}{p}$ `bytes`
            from each device.
        group_size: the size of the largest of `groups`; 0 without groups.
        count: the runs in each run of the program: the product of the trip counts of the
            loops around it. `None` where that depends on data: inside a `while` whose trip count
            is unknown, or in one of several branches of a conditional.
        dtypes: HLO names of its operands' dtypes (`f32`, `bf16`), which may differ from the dtypes in
            the source of the program.
        shapes: its operands' shapes on one device.
        groups: the devices of each group. Numbers are places in the program's device assignment
            (in a mesh, row-major), not `Device.id`. For a collective-permute, the cycles and chains
            that its pairs form.
        across_slices: whether it leaves a TPU slice, over the data-centre network. Device d of
            slice s (counted from 1) is then s · 100000 + d in `groups`.
    """

    kind: Kind
    bytes: int
    group_size: int
    count: int | None
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    groups: Groups
    across_slices: bool = False


def collectives(compiled: jax.stages.Compiled) -> tuple[Collective, ...]:
    r"""The collectives of a compiled program, in the order of its HLO text.

    The payload that one run of the program hands to collectives, per device, is

    $$\sum_{c} c.\mathrm{bytes} \cdot c.\mathrm{count}$$

    They are read from the optimised HLO, after the compiler has fused, split, widened and reordered
    operations, on CPU, GPU and TPU, and after ahead-of-time compilation, too. A collective in a computation that
    is called several times is listed for each call. Transfers without an HLO instruction are not
    listed: remote copies of Pallas kernels, and transfers between a device and its
    host. A collective whose groups are single devices sends nothing, and is left out.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns.

    Returns:
        One dataclass per operation; none for a program that runs on one device. Fields: `kind`, the HLO name;
        `bytes`, the payload of one run on one device; `group_size`; `count`, runs per call, or None if it depends on
        data; `dtypes` and `shapes` of its operands; `groups` of devices; `across_slices`.

    Raises:
        TypeError: `compiled` is anything else, for instance a `Lowered`, whose collectives are not
            decided yet.
        ValueError: its text is not available, or holds a collective that is not understood; none is
            left out silently.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> from energy_attn.distributed import collectives
        >>> mesh = Mesh(jax.devices(), ("device",))
        >>> total = jax.shard_map(
        ...     lambda x: jax.lax.psum(x, "device"), mesh=mesh, in_specs=P("device"), out_specs=P()
        ... )
        >>> compiled = jax.jit(total).lower(jnp.ones((jax.device_count(), 128))).compile()
        >>> [(c.kind, c.bytes, c.shapes, c.count) for c in collectives(compiled)]
        [('all-reduce', 512, ((1, 128),), 1)]
    """
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            "compiled: wanted jax.stages.Compiled, e.g. jax.jit(f).lower(...).compile(), "
            f"got {checks.received(compiled)}"
        )
    text = compiled.as_text()
    if text is None:
        raise ValueError(
            "compiled: wanted a program with HLO text, got one whose as_text() is None"
        )
    return collectives_in(text)


def collectives_in(text: str) -> tuple[Collective, ...]:
    """The collectives of optimised HLO text, such as a dump of XLA's."""
    called = [
        _collective(module, call)
        for module in parse(text)
        for call in _collective_calls(module, module.entry)
    ]
    return tuple(c for c in called if c.group_size != 1)


class _CollectiveCall(NamedTuple):
    computation: str
    instruction: Instruction
    kind: Kind
    times: int | None  # runs in one call of the outermost computation


def _collective_calls(module: Module, name: str) -> Iterator[_CollectiveCall]:
    computation = module.computations[name]
    starts = any("AsyncCollectiveStart" in x.rest for x in computation.values())
    for x in computation.values():
        kind = _kind(x)
        if kind is not None:
            # XLA:TPU may split a collective over several fusions. Each repeats the instruction, with a
            # `chain_id`; the first holds the start.
            if starts or "chain_id" not in x.frontend_attributes:
                yield _CollectiveCall(name, x, kind, 1)
        elif x.opcode == "while":
            for part, extra in (("condition", 1), ("body", 0)):
                # the condition runs once more than the body
                inside = [
                    call for called in x.called(part) for call in _collective_calls(module, called)
                ]
                trips = trip_count(module, name, x) if inside else None
                for call in inside:
                    times = call.times
                    if times is not None:
                        times = None if trips is None else (trips + extra) * times
                    yield call._replace(times=times)
        elif x.opcode == "conditional":
            branches = x.called(*_BRANCHES)
            for branch in branches:
                for call in _collective_calls(module, branch):
                    # a single branch always runs: the rest of a choice between platforms
                    yield call if len(branches) == 1 else call._replace(times=None)
        # the update and the end of an asynchronous pair name the computation of its start
        elif not x.opcode.endswith(("-update", "-done")):
            for called in x.called("calls", "to_apply", "called_computations"):
                yield from _collective_calls(module, called)


def _kind(x: Instruction) -> Kind | None:
    opcode = x.opcode.removesuffix("-start")
    if opcode != "send":
        return _KINDS.get(opcode)
    transfer = x.frontend_attributes.get("_xla_megascale_transfer_type")
    if transfer is not None:
        if transfer not in _MEGASCALE:
            raise ValueError(
                f"text: wanted one of {', '.join(_MEGASCALE)} between slices, got {transfer} in {x.name}"
            )
        return _MEGASCALE[transfer]
    # a permute that XLA:GPU decomposed, unless it is a transfer to the host
    return None if x.attributes.get("is_host_transfer") == "true" else "collective-permute"


def _collective(module: Module, call: _CollectiveCall) -> Collective:
    name, x, kind, times = call
    # The operands of a start, as its results repeat them. Of these two only the first is data; the others are a token,
    # or offsets of outputs.
    first = kind == "ragged-all-to-all" or x.opcode == "send"
    operands = x.operands[:1] if first else x.operands
    computation = module.computations[name]
    if "slice_sizes" in x.attributes:
        raise ValueError(
            f"text: wanted collectives of whole operands, got {x.name}, which sends slices of them"
        )
    if any(operand not in computation for operand in operands):
        raise ValueError(
            f"text: wanted operands of {x.name} that {name} defines, got {', '.join(operands)}"
        )
    sent = [array for operand in operands for array in arrays(computation[operand].shape)]
    groups = groups_of(module, x, kind)
    return Collective(
        kind,
        sum(array.bytes for array in sent),
        max(map(len, groups), default=0),
        times,
        tuple(array.dtype for array in sent),
        tuple(array.sizes for array in sent),
        groups,
        "_xla_megascale_target" in x.frontend_attributes,
    )


def waits(text: str, kind: str = "collective-permute") -> list[str]:
    """The collectives of a kind, in a scheduled program, that overlap no attention."""
    # attention is a kernel, a matrix product, or a computation with one of these
    waiting = []
    for module in parse(text):
        for computation in module.computations.values():
            instructions = list(computation.values())
            busy = [i for i, x in enumerate(instructions) if _has_products(module, x)]
            for start, x in enumerate(instructions):
                end = start  # a synchronous collective overlaps nothing
                if x.opcode == f"{kind}-start":
                    end = next(
                        i
                        for i, later in enumerate(instructions)
                        if later.opcode == f"{kind}-done" and x.name in later.operands
                    )
                elif x.opcode != kind:
                    continue
                if not any(start < i < end for i in busy):
                    waiting.append(x.name)
    return waiting


def _has_products(module: Module, x: Instruction) -> bool:
    if x.opcode in ("dot", "convolution") or any(name in x.rest for name in _KERNELS):
        return True
    if "=%" not in x.rest and "={%" not in x.rest:  # attributes are parsed on demand
        return False
    called = x.called("calls", "body", "to_apply", *_BRANCHES)
    inside = (y for name in called for y in module.computations[name].values())
    return any(_has_products(module, y) for y in inside)
