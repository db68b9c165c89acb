"""How to cite what was used."""

import importlib.metadata

_ENTRIES = {
    "software": """@software{{energy_attn,
  title   = {{energy_attn: attention as the gradient of a free energy}},
  author  = {{{{The energy_attn authors}}}},
  version = {{{version}}},
}}""",
    "tree": """@article{{shyam2024tree,
  title   = {{Tree Attention: Topology-aware Decoding for Long-Context Attention on GPU clusters}},
  author  = {{Shyam, Vasudev and Pilault, Jonathan and Shepperd, Emily and Anthony, Quentin and
             Millidge, Beren}},
  journal = {{arXiv preprint arXiv:2408.04093}},
  year    = {{2024}},
}}""",
}


def citation() -> str:
    """BibTeX entries for this library and for the paper whose idea it is.

    Returns the text; it prints nothing and raises nothing.

    Source: Tree Attention (arXiv 2408.04093).

    Examples:
        >>> import energy_attn as ea
        >>> "2408.04093" in ea.citation()
        True
    """
    version = importlib.metadata.version("energy_attn")
    return "\n\n".join(entry.format(version=version) for entry in _ENTRIES.values())
