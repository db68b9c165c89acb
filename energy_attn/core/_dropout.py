"""Attention some of whose weights are dropped."""

from jaxtyping import Array, Bool

from energy_attn.kernels.internal import RowOptions, share

from ..functional._free_energy import attention_and_energy
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
    # by no method of the energy, which would be recorded, too
    seen = keep if mask is None else keep & mask
    call, operands = prepare_at(energy, query, key, value, bias, seen, rows)
    out, kept = attention_and_energy((call,), (operands,))
    lse = energy(query, key, value, bias=bias, mask=mask, **rows)
    # if the chance is zero nothing is kept
    factor = share(kept, lse) / (chance or 1.0)
    return (out * factor[..., None].astype(out.dtype)).astype(out.dtype), lse
