"""Topologies in files: what was measured on a machine, for `"auto"`."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from energy_attn.kernels.internal import check_names, received

from ._json import json_fields, read_json
from ._topology import Link, Topology

ENVIRONMENT = "ENERGY_ATTN_TOPOLOGY"
_KEYS = ("name", "axes", "links", "all_reduce", "launch", "platform", "overhead")


def save_topology(
    path: str | os.PathLike[str],
    topology: Topology,
    axes: str | Sequence[str],
    *,
    measured: Mapping[str, Any] | None = None,
) -> None:
    """Writes a topology to a JSON file.

    Args:
        path: of the file.
        topology: what to write.
        axes: the name of the mesh axis of each link.
        measured: what it was fitted to; kept in the file and not read.

    Raises:
        TypeError: `topology` is no `Topology`, or `axes` are no names.
        ValueError: not a name for each link.
        OSError: the file cannot be written.

    Source: none: see [`load_topology`][energy_attn.distributed.cost.load_topology].

    Examples:
        >>> import tempfile
        >>> from energy_attn.distributed import cost
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     cost.save_topology(file.name, cost.ethernet(4), "node")
        ...     cost.load_topology(file.name) == cost.ethernet(4)
        True
    """
    if not isinstance(topology, Topology):
        raise TypeError(f"topology: wanted a Topology, got {received(topology)}")
    names = check_names("axes", axes, "mesh axes")
    if len(names) != len(topology.links):
        raise ValueError(
            f"axes: wanted {len(topology.links)} names, one for each link, got {names}"
        )
    fields = dataclasses.asdict(topology)
    kept = {key: list(names) if key == "axes" else fields[key] for key in _KEYS}
    if measured is not None:
        kept["measured"] = dict(measured)
    Path(path).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def load_topology(
    path: str | os.PathLike[str], axes: str | Sequence[str] | None = None
) -> Topology:
    """A topology from a JSON file, such as `python -m energy_attn bench --suite network` writes.

    Pass it to `SequenceParallel(topology=...)`, or name the file in the environment variable
    `ENERGY_ATTN_TOPOLOGY`: then `"auto"` uses the links of the mesh axes of the same names.

    Args:
        path: of the file.
        axes: the mesh axes whose links are wanted, slow ones first; None: all.

    Returns:
        A [`Topology`][energy_attn.distributed.cost.Topology].

    Raises:
        TypeError: `axes` are no names.
        ValueError: the file holds no topology, with the key that is wrong, or none of these axes.
        OSError: the file cannot be read.

    Source: none: the keys are the fields of `Topology` and `Link`, and `axes`, their names.

    Examples:
        >>> import tempfile
        >>> from energy_attn.distributed import cost
        >>> with tempfile.NamedTemporaryFile(suffix=".json") as file:
        ...     cost.save_topology(file.name, cost.ethernet(4, 2), ("node", "device"))
        ...     cost.load_topology(file.name, "device").links[0].name
        'loopback'
    """
    names, topology = _read(path)
    if axes is None:
        return topology
    wanted = check_names("axes", axes, "mesh axes")
    for name in wanted:
        if name not in names:
            raise ValueError(f"axes: wanted one of {names}, of which {path} says, got {name!r}")
    links = dict(zip(names, topology.links, strict=True))
    return dataclasses.replace(topology, links=tuple(links[name] for name in wanted))


def topology_from_environment(sizes: Mapping[str, int], axes: tuple[str, ...]) -> Topology | None:
    """The links of some axes of a mesh from the file that the environment names, if it names one."""
    path = os.environ.get(ENVIRONMENT)
    if not path:
        return None
    try:
        topology = load_topology(path, axes)
    except (ValueError, OSError) as reason:
        raise ValueError(f"{ENVIRONMENT}: {reason}") from reason
    for axis, link in zip(axes, topology.links, strict=True):
        if link.devices != sizes[axis]:
            raise ValueError(
                f"{ENVIRONMENT}: wanted {sizes[axis]} devices along {axis!r}, as the mesh in force has, "
                f"got {link.devices} in {path}"
            )
    return topology


def _read(path: str | os.PathLike[str]) -> tuple[tuple[str, ...], Topology]:
    fields = json_fields("", read_json(path), _KEYS, path, also=("measured",))
    if not isinstance(fields["links"], list):
        raise ValueError(f"links: wanted a list, got {received(fields['links'])}, in {path}")
    keys = tuple(field.name for field in dataclasses.fields(Link))
    links = [json_fields(f"links[{i}].", x, keys, path) for i, x in enumerate(fields["links"])]
    try:
        names = check_names("axes", fields.pop("axes"), "mesh axes")
        fields["links"] = tuple(Link(**link) for link in links)
        topology = Topology(**fields)
    except (TypeError, ValueError) as reason:
        raise ValueError(f"{reason}, in {path}") from reason
    if len(names) != len(topology.links):
        raise ValueError(
            f"axes: wanted a name for each of the {len(topology.links)} links, got {names}, in {path}"
        )
    return names, topology
