"""The free energy as an Equinox module."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from energy_attn.distributed import SequenceParallel
from energy_attn.kernels.internal import (
    Candidate,
    RowOptions,
    additions,
    arguments,
    candidates,
    check_mask,
    check_options,
    checks,
    share,
    split_score,
)
from energy_attn.kernels.masks import AbstractMask
from energy_attn.kernels.scores import AbstractScore

from ..functional._free_energy import (
    AttentionOptions,
    EnergyOptions,
    ModuleOptions,
    attention_and_energy,
    energy_at,
)
from ..functional._tag import recorders, tagged
from ..observables._divergence import seen_share
from ..sparse._tsallis import Tsallis, tsallis_state
from ._gibbs import (
    AbstractEnergy,
    Gibbs,
    KeySet,
    check_gibbs,
    check_rows,
    prepare_at,
    prepare_keys,
)


def _hashable(
    implementation: Candidate | Sequence[Candidate] | None,
) -> Candidate | tuple[Candidate, ...] | None:
    if isinstance(implementation, Sequence) and not isinstance(implementation, str):
        return tuple(implementation)
    return implementation


class FreeEnergy(AbstractEnergy):
    r"""The free energy as a module: options are fields, a call returns energies.

    `energy.at(query, key, value)` is the free energy as a function of the source alone, a
    [`Gibbs`][energy_attn.Gibbs], whose methods are the observables.

    $$F(\zeta) = \log \sum_a \exp(\mathrm{scale}\; q \cdot k_a + b_a + \zeta \cdot v_a)$$

    Attributes:
        scale: the factor of $q \cdot k$; None is $1/\sqrt{H}$. An array, a scalar or `[N]` with one for each head
            of queries, is a trainable parameter, the inverse temperature.
        is_causal: whether to hide keys whose position is after the query's.
        local_window_size: `(left, right)` or one int: the largest distances of a key before and after its query;
            None: any distance. Static: `mask=masks.TracedWindow(left, right)` takes arrays.
        max_window: a second static window, the bound of a `TracedWindow`; keys outside of either are hidden.
        implementation: a name of [`implementations`][energy_attn.kernels.implementations].
        parallel: how keys are sharded over the current mesh.
        mask: a mask of `energy_attn.masks`, combined with causality, the window and the mask of a call. Its
            arrays are leaves.
        score: a score of `energy_attn.scores`, a function $g$ applied to the scaled product. Its arrays are leaves.
        sink: $b$, `[N]` or `[B, N]`, a trainable parameter: the score of one more outcome whose value is
            zero, $F = \log(e^{F_{keys}} + e^b)$, as in gpt-oss (arXiv 2508.10925).
        reproducible: whether the bits of a row [depend only on the row and the keys that it sees](../reproducible.md).
        name: the name under which [`record`][energy_attn.record] reports this energy; None is its path in the model.
        regulariser: None for Shannon's entropy; or a [`Tsallis`][energy_attn.Tsallis], which makes attention
            sparse.

    Raises:
        TypeError: a field of the wrong type.
        ValueError: a scale that is not finite, a negative window, an unknown implementation.

    Source: Tree Attention (arXiv 2408.04093), equation 15.

    Examples:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import energy_attn as ea
        >>> energy = ea.FreeEnergy(is_causal=True)
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 5, 2, 4))
        >>> energy(q, k, v).shape
        (5, 2)
        >>> F = energy.at(q, k, v)
        >>> out = jax.grad(lambda source: F(source).sum())(np.zeros(q.shape, q.dtype))
        >>> bool(jnp.all(energy.attention(q, k, v) == out))
        True
    """

    scale: float | Float[Array, ""] | Float[Array, " N"] | None = None
    is_causal: bool = eqx.field(static=True, default=False)
    local_window_size: int | tuple[int | None, int | None] | None = eqx.field(
        static=True, default=None
    )
    max_window: int | tuple[int | None, int | None] | None = eqx.field(static=True, default=None)
    implementation: Candidate | tuple[Candidate, ...] | None = eqx.field(
        static=True, default=None, converter=_hashable
    )
    parallel: SequenceParallel | None = eqx.field(static=True, default=None)
    mask: AbstractMask | None = None
    score: AbstractScore | None = None
    sink: Float[Array, "... N"] | None = None
    regulariser: Tsallis | None = eqx.field(static=True, default=None)
    reproducible: bool = eqx.field(static=True, default=False)
    name: str | None = eqx.field(static=True, default=None)

    def __new__(cls, *args: Any, **options: Any) -> "FreeEnergy":
        check_options(options, ModuleOptions, "regulariser", "name")
        if any(getattr(x, "ndim", 0) > 2 for x in args):
            raise TypeError(
                "FreeEnergy: wanted options alone, as in FreeEnergy(is_causal=True).at(query, key, value), "
                f"got {checks.received(args)}"
            )
        return eqx.Module.__new__(cls)

    def __check_init__(self) -> None:
        arguments.check_scale(self.scale)
        for name in ("local_window_size", "max_window"):
            arguments.check_window(getattr(self, name), name, arrays=False)
        candidates(self.implementation, self.reproducible)
        checks.check_flag("is_causal", self.is_causal)
        if self.sink is not None:
            additions.check_sink(self.sink)
        for name, kind, wanted in (
            ("parallel", SequenceParallel, "a SequenceParallel"),
            ("name", str, "a text"),
            ("regulariser", Tsallis, "a Tsallis"),
        ):
            if not isinstance(x := getattr(self, name), kind | None):
                raise TypeError(f"{name}: wanted {wanted} or None, got {checks.received(x)}")
        if self.mask is not None:
            check_mask(
                "mask", self.mask, "a mask of energy_attn.masks or None (arrays go to the call)"
            )
        split_score(self.score)

    def at(
        self,
        query: Float[Array, "*#B T N H"],
        key: Float[Array, "*#B S K H"],
        value: Float[Array, "*#B S K Hv"],
        *,
        bias: Float[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | AbstractMask | None = None,
        **rows: Unpack[RowOptions],
    ) -> Gibbs:
        r"""The free energy of these queries and keys, as a function of the source alone.

        Arguments and errors as in [`free_energy`][energy_attn.free_energy]; `**rows` are lengths, positions
        and segment ids. An energy with a regulariser has no Gibbs measure and raises `NotImplementedError`.

        Returns:
            A [`Gibbs`][energy_attn.Gibbs], with methods for attention, covariances, entropies, samples and rate
            functions.
        """
        measure = measure_at(self, query, key, value, bias, mask, rows)
        prepared = prepare_keys(measure.parts[0])  # checks the arguments
        if recorders.value:
            query = tagged(query, self.name or "FreeEnergy", *prepared, None)
            measure = measure_at(self, query, key, value, bias, mask, rows)
        return measure

    def __call__(
        self,
        query: Float[Array, "*#B T N H"],
        key: Float[Array, "*#B S K H"],
        value: Float[Array, "*#B S K Hv"],
        *,
        source: Float[Array | np.ndarray, "*B T N Hv"] | None = None,
        bias: Float[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | AbstractMask | None = None,
        **rows: Unpack[RowOptions],
    ) -> Float[Array, "*B T N"]:
        """Energies `[B, T, N]` in nats; arguments and errors as in [`free_energy`][energy_attn.free_energy]."""
        name = self.name or "FreeEnergy"
        call, operands = prepare_at(self, query, key, value, bias, mask, rows, name, source)
        if self.regulariser is not None:
            return tsallis_state(self.regulariser, (call,), source, (operands,)).lse
        return energy_at((call,), source, (operands,))

    @overload
    def attention(
        self,
        query: Float[Array, "*#B T N H"],
        key: Float[Array, "*#B S K H"],
        value: Float[Array, "*#B S K Hv"],
        *,
        bias: Float[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | AbstractMask | None = None,
        return_energy: Literal[False] = False,
        **rows: Unpack[RowOptions],
    ) -> Float[Array, "*B T N Hv"]: ...

    @overload
    def attention(
        self,
        query: Float[Array, "*#B T N H"],
        key: Float[Array, "*#B S K H"],
        value: Float[Array, "*#B S K Hv"],
        *,
        bias: Float[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | AbstractMask | None = None,
        return_energy: Literal[True],
        **rows: Unpack[RowOptions],
    ) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...

    def attention(
        self,
        query: Float[Array, "*#B T N H"],
        key: Float[Array, "*#B S K H"],
        value: Float[Array, "*#B S K Hv"],
        *,
        bias: Float[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | AbstractMask | None = None,
        return_energy: bool = False,
        **rows: Unpack[RowOptions],
    ) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
        """Attention, or `(attention, energy)`; arguments and errors as in [`attention`][energy_attn.attention]."""
        checks.check_flag("return_energy", return_energy)
        name = self.name or "FreeEnergy"
        call, operands = prepare_at(self, query, key, value, bias, mask, rows, name)
        if self.regulariser is not None:
            out, energy = tsallis_state(self.regulariser, (call,), None, (operands,))
        else:
            out, energy = attention_and_energy((call,), (operands,))
        return (out, energy) if return_energy else out

    def _options(self) -> EnergyOptions:
        options: Any = {name: getattr(self, name) for name in EnergyOptions.__annotations__}
        return options


def energy_of(energy: object, options: ModuleOptions) -> FreeEnergy:
    """Returns the argument `energy=`, or an energy made from options. Raises `ValueError` if both are given."""
    check_options(options, ModuleOptions)
    if energy is None:
        fields: Any = options  # an array as a window is refused by the energy
        return FreeEnergy(**fields)
    if not isinstance(energy, FreeEnergy):
        raise TypeError(f"energy: wanted a FreeEnergy or None, got {checks.received(energy)}")
    if options:
        raise ValueError(
            f"energy: wanted either it or its options, got both, {', '.join(options)}="
        )
    return energy


def stacked(energy: FreeEnergy, lead: tuple[int, ...]) -> FreeEnergy:
    """Copies an energy for stacked layers: its arrays get leading axes of this shape."""
    if not lead:
        return energy
    arrays, rest = eqx.partition(energy, lambda x: isinstance(x, (jax.Array, np.ndarray)))
    return eqx.combine(jax.tree.map(lambda x: jnp.broadcast_to(x, lead + x.shape), arrays), rest)


def with_name(energy: FreeEnergy, name: str | None) -> FreeEnergy:
    # a new energy would refuse the axes of stacked layers
    copy = jax.tree.map(lambda leaf: leaf, energy)
    object.__setattr__(copy, "name", name)
    return copy


def measure_at(
    energy: FreeEnergy,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | AbstractMask | None,
    rows: RowOptions,
) -> Gibbs:
    """`energy.at(...)`, whose arguments are checked when the measure is prepared."""
    check_gibbs(energy)
    check_rows(rows)
    present: Any = {name: x for name, x in rows.items() if x is not None}
    return Gibbs((KeySet(energy, query, key, value, bias, mask, present),))


def measure_of(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: Array | None = None,
    mask: Array | AbstractMask | None = None,
    **options: Unpack[AttentionOptions],
) -> Gibbs:
    """Like `measure_at`, from the options of `attention`."""
    check_options(options, AttentionOptions, "bias", "mask")
    fields = EnergyOptions.__annotations__
    energy: Any = {name: x for name, x in options.items() if name in fields}
    rows: Any = {name: x for name, x in options.items() if name not in fields}
    return measure_at(FreeEnergy(**energy), query, key, value, bias, mask, rows)


# The parameters are the arguments of a call of an energy, and dropout.
def attention_with_dropout(
    energy: FreeEnergy,
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    mask: Array | None,
    keep: Bool[Array, "..."],
    chance: float,
    rows: RowOptions,
) -> tuple[Array, Array]:
    r"""Attention with only the weights in `keep`, divided by their probability, and the energies without dropout.

    Attention over the kept keys, times their share of the partition function,

    $$\sum_\mathrm{kept} P_a v_a = e^{F_\mathrm{kept} - F}\, \nabla F_\mathrm{kept},$$

    is the weighted sum without the matrix of weights. `keep` broadcasts as masks do. Raises as `FreeEnergy.at`.
    """
    check_gibbs(energy)
    seen = keep if mask is None else keep & mask
    lse = energy(query, key, value, bias=bias, mask=mask, **rows)
    # not `energy.attention`, which would be recorded a second time
    kept_call, whole = (prepare_at(energy, query, key, value, bias, x, rows) for x in (seen, mask))
    call, operands = kept_call
    if call.policy.attention_only:
        out, kept = attention_and_energy((call,), (operands,))
        part = share(kept, lse)
    else:
        out, _ = attention_and_energy((call,), (operands._replace(sink=None),))
        part = seen_share(whole, kept_call, lse)
    # with a probability of zero nothing is kept
    factor = part / (chance or 1.0)
    return (out * factor[..., None].astype(out.dtype)).astype(out.dtype), lse
