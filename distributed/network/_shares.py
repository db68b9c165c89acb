"""How methods share heads and keys out."""

import math

from energy_attn.kernels.internal import is_static

_MOST_PIECES = 8


def key_copies(heads: int, kv_heads: int, devices: int) -> int | None:
    """How often each head of keys is sent, so that every device has those of its own query heads.

    Once where the devices divide them; None where the devices cannot share the query heads so.
    """
    copies = devices // math.gcd(kv_heads, devices)
    return None if heads % (kv_heads * copies) else copies


def pieces(keys: int) -> int:
    """The number of equal pieces in which a device's keys are gathered, 8 at most.

    One for a number that is a symbol of `jax.export.symbolic_shape`.
    """
    if not is_static(keys):
        return 1
    return next(n for n in range(min(keys, _MOST_PIECES) or 1, 0, -1) if keys % n == 0)
