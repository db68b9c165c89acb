"""How the keys of an attention are spread over a mesh: what a user says."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from energy_attn.kernels._errors import received

_CHOICES = {
    "method": ("tree", "auto"),
    "merge": ("allreduce", "auto"),
    "layout": ("contiguous",),
}


@dataclasses.dataclass(frozen=True, init=False)
class SequenceParallel:
    r"""How the keys of an attention are spread along their sequence over a mesh.

    Device $i$ of the axes holds a contiguous part of keys and values; queries are replicated.
    Free energies of the parts add by logaddexp, so one associative reduction gives the whole.

    Attributes:
        axes: the mesh axes that the sequence of keys is sharded over, slow ones first.
        method: `"tree"`: local states, then one reduction. `"auto"` chooses; today it is `"tree"`.
        merge: `"allreduce"`: one pmax, then numerator and denominator in one psum. `"auto"`
            chooses; today it is `"allreduce"`.
        layout: `"contiguous"`: device $i$ holds the $i$-th part of the sequence.

    Raises:
        TypeError: `axes` are no names.
        ValueError: axes that repeat, or an unknown method, merge or layout.

    Source: Tree Attention (arXiv 2408.04093), section 5.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import energy_attn as ea
        >>> from energy_attn.distributed import SequenceParallel, make_mesh
        >>> q, k = jnp.ones((1, 1, 2, 4)), jnp.ones((1, 64, 2, 4))
        >>> with jax.set_mesh(make_mesh((jax.device_count(),), ("device",))):
        ...     ea.attention(q, k, k, parallel=SequenceParallel("device")).shape
        (1, 1, 2, 4)
    """

    axes: tuple[str, ...]
    method: str
    merge: str
    layout: str

    def __init__(
        self,
        axes: str | Sequence[str] = ("node", "device"),
        method: Literal["tree", "auto"] = "auto",
        merge: Literal["allreduce", "auto"] = "auto",
        layout: Literal["contiguous"] = "contiguous",
    ) -> None:
        names = (axes,) if isinstance(axes, str) else axes
        if (
            not isinstance(names, Sequence)
            or not names
            or not all(isinstance(name, str) for name in names)
        ):
            raise TypeError(f"axes: wanted names of mesh axes, got {received(axes)}")
        if len(set(names)) != len(names):
            raise ValueError(f"axes: wanted different names, got {tuple(names)}")
        given = {"method": method, "merge": merge, "layout": layout}
        for field, choices in _CHOICES.items():
            choice = given[field]
            if not isinstance(choice, str) or choice not in choices:
                raise ValueError(
                    f"{field}: wanted one of {', '.join(map(repr, choices))}, "
                    f"got {received(choice)}"
                )
        for field, value in {"axes": tuple(names), **given}.items():
            object.__setattr__(self, field, value)
