"""Functions with derivatives of their own, in both modes and to any order."""
