"""Comparisons of trees of arrays, for the whole suite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Error over tolerance of each comparison since the last test, and what was compared.
RATIOS: list[tuple[float, str]] = []


def close(found: Any, wanted: Any, what: str = "", tolerance: float = 1e-11) -> None:
    """Checks that each leaf of `found` has `wanted`'s shape and entries, within `tolerance` of its largest (or of 1).

    Infinities stand at the same entries, and nothing is NaN. What a peer computes in JAX has the dtype of ours, too.
    """
    for label, x, y in _pairs(found, wanted, what):
        of_peer = isinstance(y, jax.Array)
        x, y = (np.asarray(jax.device_get(z)) for z in (x, y))
        assert not of_peer or x.dtype == y.dtype, f"{label}: {x.dtype}, wanted {y.dtype}"
        assert x.shape == y.shape, f"{label}: shape {x.shape}, wanted {y.shape}"
        x, y = (z if z.dtype.kind in "biu" else z.astype(np.float64) for z in (x, y))
        assert not np.isnan(y).any(), f"{label}: NaN is what was wanted"
        largest = np.max(np.abs(y), initial=1.0, where=np.isfinite(y))
        apart = np.abs(np.subtract(x, y, where=np.isfinite(y), out=np.zeros(y.shape), dtype=float))
        RATIOS.append((float(np.max(apart, initial=0)) / (tolerance * largest or 1), label))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest, err_msg=label)


def near(found: Any, rough: Any, exact: Any, what: str = "", multiple: float = 4) -> None:
    """Checks that each leaf of `found` errs at most `multiple` times as much as the judge does in its dtypes.

    `rough` is the judge's answer in these dtypes, `exact` in float64 on the same data. Errors are relative to the
    largest entry of a leaf (or to 1), and the judge's is the largest of all leaves, at least a unit of rounding.
    """
    error = 0.0
    for label, x, y in _pairs(rough, exact, what):
        x, y = (np.asarray(jax.device_get(z)) for z in (x, y))
        assert y.dtype == np.float64, f"{label}: {y.dtype} is what was wanted"
        largest = np.max(np.abs(y), initial=1.0)
        error = max(error, jnp.finfo(x.dtype).eps, np.abs(x.astype(np.float64) - y).max() / largest)
    for label, x, y in _pairs(found, rough, what):
        assert x.dtype == y.dtype, f"{label}: {x.dtype}, wanted {y.dtype}"
    close(found, jax.device_get(exact), what, tolerance=multiple * float(error))


def of_sums(terms: int, sizes: Any, largest: Any = 1.0, unit: float = 2.0**-24) -> float:
    r"""The tolerance of `close` for sums in float32 of so many terms, in any order.

    `sizes`: sums of the terms' magnitudes. Rounding errors are as good as independent, so that a sum of $n$ terms $x_i$
    is off by at most about $\sqrt n\, u \sum_i |x_i|$ (Higham and Mary, doi:10.1137/18M1226312).
    """
    return float(np.sqrt(terms) * unit * np.max(sizes) / max(np.max(np.abs(largest)), 1))


def same(found: Any, wanted: Any, what: str = "") -> None:
    """Checks that each leaf of `found` has the bits and the dtype of `wanted`'s, and that none is NaN."""
    for label, x, y in _pairs(found, wanted, what):
        assert x.dtype == y.dtype, f"{label}: {x.dtype}, wanted {y.dtype}"
        x, y = (np.asarray(jax.device_get(z)) for z in (x, y))
        assert not np.isnan(x.astype(np.float64)).any(), f"{label}: NaN"
        np.testing.assert_array_equal(x, y, err_msg=label)


def _pairs(found: Any, wanted: Any, what: str) -> list[tuple[str, Any, Any]]:
    """Leaves of both in order, with what to call them; dictionaries have the same keys."""
    if isinstance(wanted, dict):
        assert set(found) == set(wanted), f"{what}: {sorted(found)}, wanted {sorted(wanted)}"
    ours, theirs = jax.tree.leaves(found), jax.tree.leaves_with_path(wanted)
    assert len(ours) == len(theirs), f"{what}: {len(ours)} arrays, wanted {len(theirs)}"
    return [
        (f"{what} {jax.tree_util.keystr(path)}".strip(), x, y)
        for x, (path, y) in zip(ours, theirs, strict=True)
    ]
