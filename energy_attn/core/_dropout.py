"""Attention some of whose weights are dropped."""

from jaxtyping import Array, Bool

from energy_attn.kernels.internal import RowOptions, share

from ..functional._free_energy import attention_and_energy
from ..observables._divergence import seen_share
from ._keys import prepare_at
from ._module import FreeEnergy, check_gibbs


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
    r"""Attention with the weights of `keep` alone, divided by the chance that one is kept; and the energies of all.

    Attention over the kept keys, times their share of the partition function,

    $$\sum_\mathrm{kept} P_a v_a = e^{F_\mathrm{kept} - F}\, \nabla F_\mathrm{kept},$$

    is the weighted sum without the matrix of weights. `keep` broadcasts as masks do. Raises as `FreeEnergy.at`.
    """
    check_gibbs(energy)
    seen = keep if mask is None else keep & mask
    lse = energy(query, key, value, bias=bias, mask=mask, **rows)
    # by no method of the energy, which would be recorded, too
    some, every = (prepare_at(energy, query, key, value, bias, x, rows) for x in (seen, mask))
    call, operands = some
    if call.policy.attention_only:
        out, kept = attention_and_energy((call,), (operands,))
        part = share(kept, lse)
    else:
        out, _ = attention_and_energy((call,), (operands._replace(sink=None),))
        part = seen_share(every, some, lse)
    # if the chance is zero nothing is kept
    factor = part / (chance or 1.0)
    return (out * factor[..., None].astype(out.dtype)).astype(out.dtype), lse
