"""The cost model: bytes, memory and seconds of a method that is named."""

from typing import TypedDict, Unpack

from energy_attn.kernels.internal import check_options, checks

from ..cost._network import Derivatives, Topology, Transfer, sent, total_seconds
from ..cost._shape import Shape, check_sizes
from ..methods._choice import VARIANTS, check_sharded, memory_of, sent_transfers


class DerivativeOptions(TypedDict, total=False):
    """Derivatives of an attention whose transfers are added; none by default."""

    tangent: bool
    """Whether to add the transfers of the tangent of the state along query, key and value."""

    gradient: bool
    """Whether to add the transfers of the gradient in query, key and value."""


def transfers(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    **derivatives: Unpack[DerivativeOptions],
) -> tuple[Transfer, ...]:
    r"""Predicts the collectives of one attention, in the order in which they run.

    With $p$ devices, $R = B T N$ rows on each, and states of $R (H_v + 1)$ numbers in `lse`'s dtype:

    $$\text{allreduce, gather: } 1 \text{ collective of a state}, \qquad
      \text{butterfly: } \lceil\log_2 p\rceil \text{ permutes of one}, \qquad
      \text{halving: } \tfrac{2p-1}{p} \text{ of one in } 2 \lceil\log_2 p\rceil + 1$$

    and $\frac{p-1}{p} B S K (H + H_v)$ numbers of keys and values around a ring, or gathered.
    [Choosing](../choosing.md#what-each-strategy-sends) has a table of all of them and of their derivatives. A gather
    on TPUs pads the last row of energies, and over 64 chips and more of one slice XLA makes it an all-reduce of $p$
    times the size.

    Args:
        method: `"tree"`, `"ring"`, `"ulysses"`, `"hybrid"` or `"gather"`; `"reproducible"` for calls with
            `reproducible=True`, which send the same by all of them.
        merge: for a tree the merge strategy; for a ring what rotates, `"keys"` or `"queries"`; None
            for the others.
        shape: the sizes.
        topology: the mesh.
        **derivatives: whose transfers are added.

    Returns:
        One dataclass per collective, none over one device: `kind`, the HLO name; `bytes`, the payload as of
        [`collectives`][energy_attn.distributed.collectives]; `axes`, indices of `Topology.links`; `count`, how often it
        runs; of a permute, `distance` along its axis, and whether devices exchange in `pairs`.

    Raises:
        TypeError: `shape` is not a `Shape`, `topology` not a `Topology`, or a flag not a bool.
        ValueError: an unknown method or merge, or one that these axes, heads or queries do not allow; both a gradient
            and a tangent; the gradient of a tree or of a ring of queries, which the model does not cover.

    Source: Tree Attention (arXiv 2408.04093), section 6.3; Ulysses (arXiv 2309.14509); USP (arXiv
        2405.07719).

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape = cost.Shape(1, 1, 640_000, 16, 16, 128)
        >>> for t in cost.transfers("tree", "allreduce", shape, cost.topology("dgx_h100", (8,), nodes=16)):
        ...     print(t.kind, t.bytes)
        all-reduce 64
        all-reduce 8256
    """
    # the merge of a ring names what rotates; other methods have none
    check_sizes(shape, topology)
    checks.check_choice("method", method, tuple(VARIANTS))
    checks.check_choice("merge", merge, tuple(VARIANTS[method]))
    variant = VARIANTS[method][merge]
    variant.check_axes(topology.axes)
    if not variant.replicated_queries:
        check_sharded(variant, shape, topology)
    check_options(derivatives, DerivativeOptions)
    tangent, gradient = (
        checks.check_flag(name, derivatives.get(name, False)) for name in ("tangent", "gradient")
    )
    if gradient and tangent:
        raise ValueError("gradient: wanted False with tangent=True, got True")
    if gradient and not variant.sends_gradient:
        raise ValueError(
            f"gradient: wanted False for {method!r} with merge={merge!r}, whose gradient the model does not "
            "cover, got True"
        )
    return tuple(sent_transfers(variant, shape, topology, Derivatives(tangent, gradient)))


def volume(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    **derivatives: Unpack[DerivativeOptions],
) -> float:
    r"""Predicts the bytes that one device puts on links for one attention.

    $$V = \sum_c n_c\, \mathrm{count}_c \cdot
      \begin{cases} 2\frac{p-1}{p} & \text{all-reduce (two trees: 2)} \\
      p - 1 & \text{all-gather} \\ \frac{p-1}{p} & \text{reduce-scatter, all-to-all} \\
      1 & \text{permute} \end{cases}$$

    for the payload $n_c$ of each of the [`transfers`][energy_attn.distributed.cost.transfers], whose arguments and
    errors it has.

    Returns:
        Bytes of the busiest device, where devices differ (`all_reduce="tree"`).

    Source: Tree Attention (arXiv 2408.04093), equations 32 to 35. Of the $p$ hops that equation 32 counts around
        the ring $p - 1$ are needed, and with grouped heads the ring sends $N/K$ times less than its $d$ says.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape, mesh = cost.Shape(1, 1, 640_000, 16, 16, 128), cost.topology("ethernet", nodes=8)
        >>> round(cost.volume("ring", "keys", shape, mesh) / cost.volume("tree", "allreduce", shape, mesh))
        315077
    """
    predicted = transfers(method, merge, shape, topology, **derivatives)
    return float(sum(sent(transfer, topology) for transfer in predicted))


def memory(method: str, merge: str | None, shape: Shape, topology: Topology) -> int:
    r"""Predicts the peak bytes of one device: its keys and values, queries, states, and receive buffers.

    $$M_\text{tree} = B \tfrac{S}{p} K (H + H_v) b + R H b + R (H_v + 2) w, \qquad
      M_\text{ring} = M_\text{tree} + 2 B \tfrac{S}{p} K (H + H_v) b$$

    A gather of keys in $C \le 8$ pieces holds two pieces of all devices' keys, $\frac{2}{C} B S K (H + H_v) b$. A
    reproducible call holds the keys of a few heads at a time. A hybrid holds the exchanged queries, keys and values,
    and twice the keys that go around its ring. Arguments and errors are those of
    [`transfers`][energy_attn.distributed.cost.transfers].

    Returns:
        Bytes, without the result and the local kernel's scratch (in a ring of keys, the scratch of queries whose
        states take 8 MiB, or of 512 queries). All-reduces work in place; every other collective arrives in a
        buffer of its own, or alternates between two where transfers overlap.

    Source: Tree Attention (arXiv 2408.04093), equations 29 and 30, where $d$ of the first terms is that of the
        keys. Equation 29 is a ring that waits for every transfer and lets its own shard go around: one shard less
        than here. It leaves out $2 b n_h$, too.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> shape, mesh = cost.Shape(1, 1, 640_000, 16, 16, 128), cost.topology("ethernet", nodes=8)
        >>> tree, ring = (cost.memory(*way, shape, mesh) for way in (("tree", "gather"), ("ring", "keys")))
        >>> round(ring / tree, 3)
        3.0
    """
    transfers(method, merge, shape, topology)  # checks
    return memory_of(VARIANTS[method][merge], shape, topology)


def latency(
    method: str,
    merge: str | None,
    shape: Shape,
    topology: Topology,
    **derivatives: Unpack[DerivativeOptions],
) -> float:
    r"""Predicts the seconds of communication of one attention, without overlap.

    $$t = \sum_c \mathrm{count}_c \left(\text{launch} + \text{hops}_c\, \alpha
      + \frac{\text{bytes}_c}{\beta}\right)$$

    with the latencies $\alpha$ and bandwidths $\beta$ of the links that each collective crosses, and the
    numbers of hops and bytes of [`Topology`][energy_attn.distributed.cost.Topology]. Arguments and errors are those of
    [`transfers`][energy_attn.distributed.cost.transfers].

    Returns:
        Seconds, for comparing strategies on one network. Measured exchanges by gloo agree within a factor of 1.5 (3.1
        where cores were busy); those of GPUs and TPUs were not measured.

    Source: Tree Attention (arXiv 2408.04093), section 5.2: Theorem 1's $\log p$ steps are those of a tree.

    Examples:
        >>> from energy_attn.distributed import cost
        >>> mesh = cost.topology("ethernet", nodes=8, latency=4e-3)
        >>> shape = cost.Shape(1, 1, 640_000, 16, 16, 128)
        >>> merges = ("allreduce", "gather", "butterfly")
        >>> min(merges, key=lambda merge: cost.latency("tree", merge, shape, mesh))
        'butterfly'
    """
    return total_seconds(transfers(method, merge, shape, topology, **derivatives), topology)
