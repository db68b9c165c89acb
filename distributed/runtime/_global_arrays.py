"""Makes global arrays from the data of each process, and fetches them."""

import itertools
from typing import Any, TypeVar

import jax
import jax.core
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from energy_attn.kernels.internal import checks

Arrays = TypeVar("Arrays")


def place(
    local: Arrays, sharding: NamedSharding | PartitionSpec, *, replicated: bool = False
) -> Arrays:
    """Makes global arrays from the data of each process.

    Every process calls it with its own part: along a dimension that is sharded over processes, the
    parts are laid end to end in the mesh's order; along the others each part is the whole, equal in
    all processes.

    Args:
        local: this process's part, an array (NumPy, or JAX on this process's devices) or a tree of
            them.
        sharding: of the global array: a `NamedSharding`, or the `PartitionSpec` of one in the mesh
            in force (`jax.set_mesh`).
        replicated: whether every process passes the whole array instead, equal in all of them, and
            its devices take their parts of it.

    Returns:
        The global arrays, with that sharding; float64 and int64 as JAX's settings have them.

    Raises:
        TypeError: leaves that are not arrays, or `sharding` is of another type.
        ValueError: no mesh is in force, the sharding does not fit, or an array is already sharded
            over other processes.

    Examples:
        >>> import jax, numpy as np
        >>> from energy_attn.distributed import fetch, make_mesh, place
        >>> n = jax.device_count()
        >>> with jax.set_mesh(make_mesh()):
        ...     key = place(np.ones((1, 4 * n, 2, 8), np.float32), jax.P(None, ("node", "device")))
        >>> key.addressable_data(0).shape, fetch(key).shape == key.shape
        ((1, 4, 2, 8), True)
    """
    checks.check_flag("replicated", replicated)
    if isinstance(sharding, PartitionSpec):
        mesh = jax.sharding.get_mesh()
        if mesh.empty:
            raise ValueError(
                f"sharding: wanted a NamedSharding, or jax.set_mesh(mesh) in force, got {sharding}"
            )
        try:
            sharding = NamedSharding(mesh, sharding)
        except ValueError as error:
            raise ValueError(
                f"sharding: wanted axes of the mesh in force, {mesh.axis_names}, got {sharding}"
            ) from error
    if not isinstance(sharding, NamedSharding):
        raise TypeError(
            f"sharding: wanted a NamedSharding or a PartitionSpec, got {checks.received(sharding)}"
        )
    return jax.tree.map(lambda x: _placed(x, sharding, replicated), local)


def place_like(tree: Arrays, like: PyTree) -> Arrays:
    """Gives the arrays of a tree the shardings of another one, for instance after reading it from a file.

    `eqx.tree_deserialise_leaves` leaves all arrays on one device, for which a compiled function is
    compiled again.

    Args:
        tree: arrays (NumPy, or JAX on this process's devices), whole and equal in all processes; other
            leaves are returned as they are.
        like: the same tree, such as the model and the state of the optimiser as training begins. Its
            arrays may be abstract, as `eqx.filter_eval_shape` and
            [`shard`][energy_attn.models.shard] return them.

    Returns:
        The tree with the shardings of `like`. Arrays that are uncommitted there, as new ones on the default
        device, stay where they are.

    Raises:
        TypeError: a leaf that is not an array where `like` has one, or a traced one.
        ValueError: trees of different structure, arrays of another shape or dtype, or sharded over
            processes; the leaf is named.

    Examples:
        >>> import io, equinox as eqx, jax, jax.numpy as jnp
        >>> from energy_attn.distributed import make_mesh, place, place_like
        >>> with jax.set_mesh(make_mesh()):
        ...     model = place({"weight": jnp.ones((jax.device_count(), 2))}, jax.P("device"))
        >>> file = io.BytesIO()
        >>> eqx.tree_serialise_leaves(file, model)
        >>> _ = file.seek(0)
        >>> read = place_like(eqx.tree_deserialise_leaves(file, model), model)
        >>> read["weight"].sharding == model["weight"].sharding
        True
    """
    _check_structure(tree, like)
    return jax.tree_util.tree_map_with_path(_placed_like, tree, like)


def fetch(x: PyTree[Array | np.ndarray]) -> PyTree[np.ndarray]:
    """Brings whole arrays into the memory of every process.

    `np.asarray` takes only arrays of which this process has every part. This also takes arrays that
    are sharded over processes; for them it is a collective, which every process has to call, and the
    whole array is on each device for a moment. This process's own parts are `x.addressable_shards`.

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
    name = "tree" + jax.tree_util.keystr(path)
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
            raise ValueError(f"tree: wanted a leaf {expected} as in like, got {got}")
    raise ValueError("tree: wanted the static fields of like, got others with the same leaves")


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
