#!/usr/bin/env python3
"""Compare the bits of matrix products in tiles, for many widths and heights.

    python tools/product_bits.py [--widths 1-300] [--rows 1,9,32,33,130]

Each product is computed for all rows together, and for the first few of them alone. Prints the widths where a row has
other bits, and returns 1 if there are any. For other compilers and CPUs, set `XLA_FLAGS` (`--xla_cpu_max_isa=AVX2`,
`--xla_backend_optimization_level=0`) or `NPROC=1`, or run it by `qemu-x86_64 -cpu EPYC-Milan`.
"""

import argparse
import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from energy_attn.models.decoder._by_rows import by_rows

USUAL = 64, 96, 128, 256, 384, 512, 768, 896, 1024, 1536, 2048, 2816, 4096, 5632, 8192
OTHERS = 1, 8, 50, 96, 300
VOCABULARY = (64, 32000), (512, 32000)
TOGETHER = 40  # products in a program


def numbers(text: str) -> list[int]:
    """Reads `3,8-10`."""
    ends = [[int(x) for x in part.split("-")] for part in text.split(",")]
    return [n for first, *last in ends for n in range(first, (last or [first])[0] + 1)]


def pairs(widths: list[int]) -> list[tuple[int, int]]:
    """Pairs of inner and outer widths: each with some others, both ways, and the usual ones with each other."""
    found = [x for n in widths for m in OTHERS for x in ((n, m), (m, n))]
    return list(dict.fromkeys([*found, *itertools.product(USUAL, USUAL[::3]), *VOCABULARY]))


@functools.partial(jax.jit, static_argnums=2)
def products(x: jax.Array, weights: list[jax.Array], is_turned: bool) -> list[jax.Array]:
    """Multiplies rows by matrices `[in, out]`, or `[out, in]` that are turned."""

    def of_tile(x: jax.Array) -> list[jax.Array]:
        if is_turned:
            return [x[..., : w.shape[1]] @ w.T for w in weights]
        return [x[..., : w.shape[0]] @ w for w in weights]

    return by_rows(of_tile, x)


def main() -> int:
    """Compares all widths."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=numbers, default=numbers("1-300"))
    parser.add_argument("--rows", type=numbers, default=numbers("1,9,32,33,130"))
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    *few, most = sorted(args.rows)
    other, count = [], 0
    compared = pairs(args.widths)
    for batch in (compared[i : i + TOGETHER] for i in range(0, len(compared), TOGETHER)):
        x = jnp.asarray(rng.standard_normal((1, most, max(k for k, _ in batch))), args.dtype)
        for is_turned in (False, True):
            sizes = [(n, k) if is_turned else (k, n) for k, n in batch]
            weights = [jnp.asarray(rng.standard_normal(size), args.dtype) for size in sizes]
            whole = products(x, weights, is_turned)
            for rows in few:
                for pair, found, wanted in zip(
                    batch, products(x[:, :rows], weights, is_turned), whole, strict=True
                ):
                    count += 1
                    if not np.array_equal(np.asarray(found), np.asarray(wanted[:, :rows])):
                        other.append((pair, rows, is_turned))
    print(f"{count} products, {len(other)} with other bits {other[:20] or ''}")
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
