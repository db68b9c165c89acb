"""The decode step that `latency.py` times: its arrays, and the answer in float64. Plain NumPy."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

HEADS, WIDTH = 16, 64


class Problem(NamedTuple):
    """A query and evenly sharded keys; any process can make any shard."""

    keys: int
    devices: int

    def query(self) -> np.ndarray:
        """`[1, 1, N, H]`, in float32."""
        return self._random(self.devices)(1)

    def shard(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of one device, `[1, S/p, N, H]` in float32."""
        random = self._random(device)
        each = self.keys // self.devices
        return random(each), random(each)

    def answer(self) -> tuple[np.ndarray, float]:
        r"""Attention in float64, and the size of its terms.

        $$\mathrm{out} = \sum_a P_a v_a, \qquad \max \sum_a P_a\, |v_a|$$

        Returns:
            `out` `[N, H]`; and the scale of its rounding errors in another dtype.
        """
        query = self.query()[0, 0].astype(np.float64)
        parts = [self.shard(device) for device in range(self.devices)]
        key, value = (np.concatenate(x, axis=1)[0] for x in zip(*parts, strict=True))
        out, size = np.empty((HEADS, WIDTH)), 0.0
        for head in range(HEADS):
            values = value[:, head].astype(np.float64)
            scores = key[:, head].astype(np.float64) @ query[head] / np.sqrt(WIDTH)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out[head] = weights @ values
            size = max(size, float((weights @ abs(values)).max()))
        return out, size

    def _random(self, part: int) -> Callable[[int], np.ndarray]:
        rng = np.random.default_rng((self.keys, self.devices, part))

        def normal(length: int) -> np.ndarray:
            return rng.standard_normal((1, length, HEADS, WIDTH), dtype=np.float32)

        return normal
