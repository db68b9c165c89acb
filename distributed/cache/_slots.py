"""The arithmetic of a block-cyclic cache between tokens and slots, for NumPy and JAX."""

from typing import NamedTuple, TypeVar

import numpy as np
from jaxtyping import Array

Index = TypeVar("Index", Array, np.ndarray)


class Slots(NamedTuple):
    r"""A layout of tokens over the slots of several devices; static.

    Token $n$ is in block $g = \lfloor n / b \rfloor$, on device $g \bmod p$. The $u$-th token of a
    device is in its slot $u \bmod c$, with $c$ slots on each device, so that a token takes the slot
    of the one `capacity` before it.

    Attributes:
        capacity: the slots of all devices together.
        block: tokens in a block, $b$; it divides the slots of a device.
        devices: $p$.
    """

    capacity: int
    block: int
    devices: int

    @property
    def per_device(self) -> int:
        """The slots of one device."""
        return self.capacity // self.devices

    @property
    def stripe(self) -> int:
        """The tokens of one block on every device."""
        return self.block * self.devices

    def most(self, tokens: int) -> int:
        """The most tokens of one device among `tokens` consecutive ones."""
        return tokens // self.stripe * self.block + min(tokens % self.stripe, self.block)

    def below(self, device: Index, token: Index) -> Index:
        """How many tokens before `token` a device holds."""
        in_stripe = token % self.stripe - device * self.block
        return token // self.stripe * self.block + in_stripe.clip(0, self.block)

    def token(self, device: Index, count: Index) -> Index:
        """The token that a device holds as its `count`-th, from 0."""
        return count // self.block * self.stripe + device * self.block + count % self.block

    def slot(self, token: Index) -> Index:
        """The index of a token among the slots of all devices."""
        within = token % self.capacity
        device = within // self.block % self.devices
        return device * self.per_device + within // self.stripe * self.block + within % self.block

    def held(self, slot: Index, length: Index) -> Index:
        """The newest of the tokens below `length` that a slot may hold; negative if there is none.

        `slot` counts the slots of all devices, and broadcasts against `length`.
        """
        first = self.token(slot // self.per_device, slot % self.per_device)
        not_yet = first >= length % self.capacity
        laps = length // self.capacity - not_yet.astype(length.dtype)
        return first + self.capacity * laps
