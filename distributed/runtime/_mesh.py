"""Meshes of devices, and global arrays on them, from the data of each process."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from energy_attn.kernels.internal import checks

_SLICE, _PROCESS = "slice_index", "process_index"  # attributes of a device

Arrays = TypeVar("Arrays")


def make_mesh(
    shape: Sequence[int] | None = None,
    axis_names: Sequence[str] = ("node", "device"),
    *,
    devices: Sequence[Any] | None = None,
    explicit: bool = False,
) -> Mesh:
    """A mesh of devices with named axes, slow axes first.

    Devices that share a fast network are neighbours along the last axes, and hosts along the first.
    The nodes of the slow network are TPU slices (or, on GPUs, hosts) where
    `Device.slice_index` differs, and processes otherwise; the first axes take the factors
    of their number. Within each slice `jax.experimental.mesh_utils` makes neighbours of the mesh
    neighbours on the chips' links. One TPU slice has no slow network.

    Args:
        shape: the size of each axis. None with two axes means slices × devices of each where there
            are several, else processes × devices of each (1 × all where each process has one
            device of the same slice); with a single axis, all devices.
        axis_names: a name for each axis; by default `("node", "device")`, the axes over which
            [`SequenceParallel`][energy_attn.distributed.SequenceParallel] shards keys.
        devices: the devices; all by default. Devices of one node of the slow network become
            neighbours; otherwise their order is kept, unless links determine it.
        explicit: whether the axes are explicit: array types then have the sharding (`jax.typeof`),
            and attention takes the sharded path by itself.

    Returns:
        A `jax.sharding.Mesh`; put it in force with `jax.set_mesh(mesh)`.

    Raises:
        TypeError: names that are not strings, sizes that are not integers, or `devices` that are
            not devices.
        ValueError: names that repeat, a number of names other than of sizes, or sizes that do not
            use every device; or, with `shape` None, parts of the slow network that differ in size.

    Source: the two-level meshes of Tree Attention (arXiv 2408.04093), section 6.

    Examples:
        >>> import jax
        >>> from energy_attn.distributed import make_mesh
        >>> make_mesh((jax.device_count(),), ("device",)).axis_names
        ('device',)
    """
    names = checks.check_names("axis_names", axis_names, "axes")
    if devices is not None and not (
        isinstance(devices, Sequence) and all(isinstance(x, jax.Device) for x in devices)
    ):
        raise TypeError(
            f"devices: wanted a sequence of devices or None, got {checks.received(devices)}"
        )
    all_devices = jax.devices() if devices is None else list(devices)
    if not all_devices:
        raise ValueError("devices: wanted at least one, got none")
    if shape is None:
        shape = _default_shape(all_devices, names)
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"shape: wanted a sequence of integers, got {checks.received(shape)}")
    shape = tuple(checks.check_integer("shape", size, least=1) for size in shape)
    if len(shape) != len(names):
        raise ValueError(f"shape: wanted a size for each of the axes {names}, got {shape}")
    if math.prod(shape) != len(all_devices):
        raise ValueError(
            f"shape: wanted sizes whose product is {len(all_devices)} devices, got {shape}"
        )
    kind = AxisType.Explicit if checks.check_flag("explicit", explicit) else AxisType.Auto
    return Mesh(_arranged(shape, all_devices), names, axis_types=(kind,) * len(names))


def place(
    local: Arrays,
    sharding: NamedSharding | PartitionSpec | None = None,
    *,
    like: PyTree | None = None,
    replicated: bool = False,
) -> Arrays:
    """Makes global arrays from the data of each process.

    Every process calls it with its own part: along a dimension that is sharded over processes, the
    parts are concatenated in the mesh's order; along the others each part is the whole, equal in
    all processes. With `like`, arrays get the shardings of another tree, for instance after reading them
    from a file: `eqx.tree_deserialise_leaves` puts all arrays on one device, and a compiled function
    would be compiled again for them.

    Args:
        local: this process's part, an array (NumPy, or JAX on this process's devices) or a tree of
            arrays. With `like`, whole arrays, equal in all processes; other leaves are returned unchanged.
        sharding: the sharding of the global array: a `NamedSharding`, or a `PartitionSpec` for the mesh in force
            (`jax.set_mesh`).
        like: in place of `sharding`, the same tree with the shardings, such as the model and the state of
            the optimiser at the start of training. Its arrays may be abstract, as `eqx.filter_eval_shape` and
            [`shard`][energy_attn.models.shard] return them. Where its arrays are uncommitted, such as new ones on
            the default device, arrays stay on their device.
        replicated: whether every process passes the whole array, equal in all processes, and
            its devices take their shards of it.

    Returns:
        The global arrays, with that sharding; float64 and int64 as JAX's settings have them.

    Raises:
        TypeError: a leaf is no array or is traced, or `sharding` has another type.
        ValueError: both of `sharding` and `like` or none, no mesh is in force, the sharding does not fit, or an
            array is already sharded over other processes. With `like`, trees of different structure, or arrays
            of another shape or dtype; the leaf is named.

    Examples:
        >>> import io, equinox as eqx, jax, jax.numpy as jnp, numpy as np
        >>> from energy_attn.distributed import fetch, make_mesh, place
        >>> n = jax.device_count()
        >>> with jax.set_mesh(make_mesh()):
        ...     key = place(np.ones((1, 4 * n, 2, 8), np.float32), jax.P(None, ("node", "device")))
        >>> key.addressable_data(0).shape, fetch(key).shape == key.shape
        ((1, 4, 2, 8), True)
        >>> file = io.BytesIO()
        >>> eqx.tree_serialise_leaves(file, key)
        >>> _ = file.seek(0)
        >>> place(eqx.tree_deserialise_leaves(file, key), like=key).sharding == key.sharding
        True
    """
    checks.check_flag("replicated", replicated)
    if (sharding is None) == (like is None):
        raise ValueError(
            f"sharding: wanted either sharding or like, got {checks.received(sharding)} and {checks.received(like)}"
        )
    if like is not None:
        _check_structure(local, like)
        return jax.tree_util.tree_map_with_path(_placed_like, local, like)
    # without `like`, one sharding for all leaves
    named = _named_sharding(sharding)
    return jax.tree.map(lambda x: _placed(x, named, replicated), local)


def fetch(x: PyTree[Array | np.ndarray]) -> PyTree[np.ndarray]:
    """Brings whole arrays into the memory of every process.

    `np.asarray` takes only arrays whose shards are all on this process's devices. For arrays that
    are sharded over processes this is a collective, which every process has to call, and the
    whole array is on each device for a moment. This process's own shards are `x.addressable_shards`.

    Args:
        x: an array, or a tree of arrays, as a jitted function returned them.

    Returns:
        The same tree of NumPy arrays, equal in all processes.

    Raises:
        TypeError: leaves that are not arrays, or are traced (inside `jax.jit`).

    Examples:
        >>> import jax.numpy as jnp
        >>> from energy_attn.distributed import fetch
        >>> fetch({"energy": jnp.zeros((1, 2))})
        {'energy': array([[0., 0.]], dtype=float32)}
    """
    return jax.tree.map(_fetched, x)


def _default_shape(devices: Sequence[Any], names: tuple[str, ...]) -> tuple[int, ...]:
    if len(names) == 1:
        return (len(devices),)
    if len(names) > 2:
        raise ValueError(f"shape: wanted the size of each of the axes {names}, got None")
    sizes = _sizes(devices, _SLICE) or _sizes(devices, _PROCESS)
    if len(set(sizes)) > 1:
        raise ValueError(
            "shape: wanted the size of each axis, as slices or processes have different numbers "
            f"of devices ({', '.join(map(str, sizes))}); got None"
        )
    if sizes[0] == 1 and getattr(devices[0], _SLICE, None) is not None:
        return (1, len(devices))  # a process for each device, on one fast network
    return (len(sizes), sizes[0])


def _arranged(shape: tuple[int, ...], devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array of this shape, with the slow network along the first axes."""
    parts = _sizes(devices, _SLICE)
    by_process = not parts and devices[0].platform != "tpu"
    if by_process:
        parts = _sizes(devices, _PROCESS)
    if len(parts) <= 1:
        return _linked(mesh_utils.create_device_mesh, shape, devices)
    if len(set(parts)) > 1:
        if not by_process:
            raise ValueError(
                "devices: wanted as many of each slice, "
                f"got {', '.join(map(str, parts))} of {len(parts)} slices"
            )
        return np.array(devices, dtype=object).reshape(shape)
    # the first axes take the factors of the number of slices or processes
    remaining, slow = len(parts), []
    for size in shape:
        slow.append(math.gcd(size, remaining))
        remaining //= slow[-1]
    fast = [size // across for size, across in zip(shape, slow, strict=True)]
    return _linked(
        mesh_utils.create_hybrid_device_mesh,
        fast,
        slow,
        devices,
        process_is_granule=by_process,
        should_sort_granules_by_key=False,
    )


def _linked(arrange: Callable[..., np.ndarray], *args: Any, **options: Any) -> np.ndarray:
    try:
        return arrange(*args, **options)
    except NotImplementedError:
        # sizes that are no products of axes of the torus split these axes
        return arrange(*args, **options, allow_split_physical_axes=True)


def _sizes(devices: Sequence[Any], part: str) -> list[int]:
    """The number of devices in each slice or process; empty where devices have no slices."""
    parts = [getattr(device, part, None) for device in devices]
    distinct = len(set(parts)) > 1 or part == _PROCESS
    return [parts.count(name) for name in dict.fromkeys(parts)] if distinct else []


def network_part(device: Any) -> int:
    """The node of the slow network of a device: its slice if it has one; for CPUs, its process."""
    part = None if device.platform == "cpu" else getattr(device, _SLICE, None)
    if part is None:
        return 0 if device.platform == "tpu" else device.process_index
    return part


def _named_sharding(sharding: object) -> NamedSharding:
    if isinstance(sharding, PartitionSpec):
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                f"sharding: wanted a NamedSharding, or jax.set_mesh(mesh) in force, got {sharding}"
            )
        try:
            return NamedSharding(mesh, sharding)
        except ValueError as error:
            raise ValueError(
                f"sharding: wanted axes of the mesh in force, {mesh.axis_names}, got {sharding}"
            ) from error
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"sharding: wanted a NamedSharding or a PartitionSpec, got {checks.received(sharding)}"
        )
    return sharding


def _placed(local: Array | np.ndarray, sharding: NamedSharding, replicated: bool) -> jax.Array:
    _check_concrete("local", local)
    if isinstance(local, jax.Array) and not local.is_fully_addressable:
        raise ValueError(
            "local: wanted this process's part, got an array that is sharded over processes, "
            f"{checks.received(local)}; jax.device_put gives it another sharding"
        )
    if len(sharding.spec) > local.ndim:
        raise ValueError(
            f"sharding: wanted at most {local.ndim} dimensions for {checks.received(local)}, "
            f"got {sharding.spec}"
        )
    part = np.asarray(local, jax.dtypes.canonicalize_dtype(local.dtype))
    try:
        return jax.make_array_from_process_local_data(
            sharding, part, part.shape if replicated else None
        )
    except ValueError as error:
        expected = "the whole array" if replicated else "this process's part of an array"
        raise ValueError(
            f"local: wanted {expected} that {sharding.spec} divides over the mesh "
            f"{dict(sharding.mesh.shape)}, got {checks.received(local)}: {error}"
        ) from error


def _placed_like(path: Any, leaf: Any, other: Any) -> Any:
    if not isinstance(other, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    name = "local" + jax.tree_util.keystr(path)
    _check_concrete(name, leaf)
    if leaf.shape != other.shape or leaf.dtype != other.dtype:
        expected = f"{other.dtype}[{','.join(map(str, other.shape))}]"
        raise ValueError(f"{name}: wanted {expected} as in like, got {checks.received(leaf)}")
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{name}: wanted a whole array, got one that is sharded over processes, {checks.received(leaf)}"
        )
    if other.sharding is None or (isinstance(other, jax.Array) and not other.committed):
        return leaf
    has_numbers = not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)  # or random keys
    array = np.asarray(leaf) if has_numbers else leaf
    return jax.make_array_from_callback(leaf.shape, other.sharding, lambda part: array[part])


def _check_structure(tree: PyTree, like: PyTree) -> None:
    if jax.tree.structure(tree) == jax.tree.structure(like):
        return
    names = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(x)]
        for x in (like, tree)
    )
    for expected, got in itertools.zip_longest(*names, fillvalue="none"):
        if expected != got:
            raise ValueError(f"local: wanted a leaf {expected} as in like, got {got}")
    raise ValueError("local: wanted the static fields of like, got others with the same leaves")


def _fetched(x: Array | np.ndarray) -> np.ndarray:
    _check_concrete("x", x)
    if isinstance(x, np.ndarray) or x.is_fully_addressable:
        return np.asarray(x)
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    return multihost_utils.process_allgather(x, tiled=True)


def _check_concrete(name: str, x: Any) -> None:
    checks.check_array(name, x)
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name}: wanted an array outside jax.jit and the like, got {checks.received(x)}"
        )
