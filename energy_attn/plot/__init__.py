"""Plots of results of the library; matplotlib, which is an optional dependency, is imported when one is drawn.

The extra `plot` installs it.

Examples:
    >>> import jax
    >>> import energy_attn as ea
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2))
    >>> figure = ea.plot.landscape(ea.landscape(q[0], k, v, points=9))
"""

from ._figures import energy_report as energy_report
from ._figures import landscape as landscape
from ._figures import mask as mask
from ._figures import weights as weights
