"""Plots of what the library computes; matplotlib is imported when one is drawn, and is not installed with the package.

The extra `plot` installs it.
"""

from ._energy_report import energy_report as energy_report
from ._landscape import landscape as landscape
