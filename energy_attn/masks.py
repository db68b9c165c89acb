"""Rules that compose: which key positions a query position sees."""

from energy_attn.kernels.masks import *  # noqa: F403  # one list of the rules, there
