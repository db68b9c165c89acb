"""The devices of a collective, from the several notations of HLO."""

import itertools
import re

import numpy as np

from ._parse import Instruction, Module, split

Groups = tuple[tuple[int, ...], ...]

_REDUCING = ("all-reduce", "all-gather", "reduce-scatter")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? *\{([^}]*)\}")
_AXIS = re.compile(r"([^,:]+)(?::\((\d+)\)(\d+))?")
# Device d of TPU slice s, counted from 1, is s · _SLICE + d to the runtime between slices.
_SLICE = 100_000
_PRODUCT = re.compile(r"\{([\d,:]+)\}x\{([\d,:]+)\}")


def groups_of(module: Module, instruction: Instruction, kind: str) -> Groups:
    """The devices of each group, as places in the device assignment; for a permute, its cycles and chains."""
    # with P partitions, partition i of replica r is device r P + i
    attributes, frontend = instruction.attributes, instruction.frontend_attributes
    try:
        if "_xla_megascale_target" in frontend:
            groups = _slices(frontend["_xla_megascale_target"])
        elif kind == "collective-permute":
            pairs = attributes.get("source_target_pairs")
            if pairs is None:
                pairs = frontend["_xla_send_recv_source_target_pairs"]
            groups = _devices(module, instruction, kind, _chains(_lists(pairs)))
        else:
            text = attributes["replica_groups"]
            if "device_ids" in attributes:
                text += ", device_ids=" + attributes["device_ids"]
            groups = _devices(module, instruction, kind, _listed(text))
    except (KeyError, ValueError):
        raise ValueError(
            f"text: wanted groups of devices as XLA prints them in {instruction.name}, "
            f"got {instruction.rest[:100]}"
        ) from None
    return tuple(map(tuple, groups))


def _devices(
    module: Module, instruction: Instruction, kind: str, listed: list[list[int]]
) -> list[list[int]]:
    # The meaning of the listed numbers, and of an empty list, depends on two attributes
    # (openxla.org/xla/operation_semantics, "Collective ops"; `GetCollectiveOpGroupMode`).
    replicas, count = range(module.replicas), module.partitions
    if not listed and kind == "collective-permute":
        return []
    if instruction.attributes.get("use_global_device_ids") == "true":
        return listed or [list(range(module.replicas * count))]
    if "channel_id" not in instruction.attributes:  # replicas; each partition by itself
        listed = listed or [list(replicas)]
        return [[r * count + i for r in group] for group in listed for i in range(count)]
    if kind in _REDUCING:  # replicas, all partitions together
        listed = listed or [list(replicas)]
        return [[r * count + i for r in group for i in range(count)] for group in listed]
    listed = listed or [list(range(count))]  # partitions, of each replica by itself
    return [[r * count + i for i in group] for group in listed for r in replicas]


def _integers(text: str) -> list[int]:
    return [int(item) for item in text.split(",") if item]


def _lists(text: str) -> list[list[int]]:
    if not text.startswith("{"):
        raise ValueError(text)
    return [_integers(item[1:-1]) for item in split(text, 1)[0]]


def _chains(pairs: list[list[int]]) -> list[list[int]]:
    """Connected components of the pairs (source, target), each in the order in which data moves."""
    chains: dict[int, list[int]] = {}
    for source, target in pairs:
        start, end = chains.setdefault(source, [source]), chains.setdefault(target, [target])
        if start is not end:
            start.extend(end)
            chains.update(dict.fromkeys(end, start))
    return list({id(chain): chain for chain in chains.values()}.values())


def _listed(text: str) -> list[list[int]]:
    iota, mesh = _IOTA.fullmatch(text), _MESH.fullmatch(text)
    if iota:
        return _iota(*iota.groups()[1:]).reshape(_integers(iota[1])).tolist()
    return _mesh(*mesh.groups()) if mesh else _lists(text)


def _iota(sizes: str, order: str | None) -> np.ndarray:
    # all numbers below the product of the sizes, in that shape, transposed
    shape = _integers(sizes)
    grid = np.arange(np.prod(shape)).reshape(shape)
    return grid if order is None else grid.transpose(_integers(order))


def _mesh(mesh: str, devices: str | None, axes: str) -> list[list[int]]:
    """Groups along mesh axes, `mesh['a'=2,'b'=8] {'a','b':(2)4}`."""
    # 'b':(2)4 is the factor of size 4 of axis b, after factors with the product 2
    sizes = {name: int(size) for name, size in (item.split("=") for item in mesh.split(","))}
    parts = [
        (name, int(left or 1), int(size or sizes[name])) for name, left, size in _AXIS.findall(axes)
    ]
    # every axis is split at the bounds of its parts
    factors: list[tuple[str, int, int]] = []
    for name, size in sizes.items():
        cuts = {1, size} | {c for n, left, s in parts if n == name for c in (left, left * s)}
        factors += [(name, low, high) for low, high in itertools.pairwise(sorted(cuts))]
    inside = [
        i
        for name, left, size in parts
        for i, (n, low, high) in enumerate(factors)
        if n == name and left <= low and high <= left * size
    ]
    outside = [i for i in range(len(factors)) if i not in inside]
    if devices is None:
        grid = np.arange(np.prod(list(sizes.values())))
    elif devices.startswith("["):
        shape, _, order = devices.removeprefix("[").removesuffix(")").partition("]T(")
        grid = _iota(shape, order)
    else:
        grid = np.array(_integers(devices))
    grid = grid.reshape([high // low for _, low, high in factors]).transpose(outside + inside)
    return grid.reshape(-1, np.prod([size for _, _, size in parts], dtype=int)).tolist()


def _slices(target: str) -> list[list[int]]:
    """Members of a collective between slices: `{1,2}x{0:7}`, `{{100000,200000},...}`, `{{a->b},...}`."""
    product = _PRODUCT.fullmatch(target)
    if product:
        slices, devices = (_spans(text) for text in product.groups())
        return [[s * _SLICE + d for s in slices] for d in devices]
    groups = _lists(target.replace("->", ","))
    return _chains(groups) if "->" in target else groups


def _spans(text: str) -> list[int]:
    # 0:3,7 is 0, 1, 2, 3, 7
    bounds = ([int(n) for n in item.split(":")] for item in text.split(","))
    return [n for first, *stop in bounds for n in range(first, (stop or [first])[0] + 1)]
