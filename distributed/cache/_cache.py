"""A cache of keys and values of fixed size, sharded over devices."""

import dataclasses
import os
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Unpack, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from energy_attn.kernels import AttentionState
from energy_attn.kernels.internal import MergedScoreOptions, checks
from energy_attn.kernels.masks import AbstractMask

from ..methods._parallel import SequenceParallel
from ._arguments import check_queries, check_reach, check_room, check_scores
from ._files import check_path, reload, write
from ._fork import ForkedCache
from ._layout import slots_for
from ._tokens import AbstractTokens
from ._write import blank, repeat_rows

Measure = TypeVar("Measure", covariant=True)


@runtime_checkable
class EnergyLike(Protocol[Measure]):
    """The interface of an energy that a cache uses, such as `energy_attn.FreeEnergy`: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def local_window_size(self) -> int | tuple[int | None, int | None] | None: ...

    @property
    def parallel(self) -> SequenceParallel | None: ...

    def at(
        self,
        query: Float[Array, "B T N H"],
        key: Float[Array, "B S K H"],
        value: Float[Array, "B S K Hv"],
        *,
        query_positions: Int[Array, "B T"] | None,
        key_positions: Int[Array, "B S"] | None,
    ) -> Measure: ...


class KVCache(AbstractTokens):
    r"""Keys and values of the tokens read so far, sharded along the sequence.

    Tokens are dealt to devices in blocks: with blocks of $b$ tokens and $p$ devices,

    $$\mathrm{device}(n) = \lfloor n / b \rfloor \bmod p$$

    so that at every length no device holds more than one block more than another. The token
    `capacity` later takes the same slot: with a window the cache is a ring buffer. Attention needs
    only `positions`, the token in each slot.

    Every method returns a new cache. Inside `jax.jit` with the cache donated
    (`donate_argnums=`), `append` writes in place and sends nothing between devices.

    Attributes:
        key: `[B, capacity, K, H]`, as stored: in `dtype`, or int8.
        value: `[B, capacity, K, Hv]`.
        key_scale: None, or float32 `[B, capacity, K]`: the scale of int8 keys.
        value_scale: None, or float32 `[B, capacity, K]`: the scale of int8 values.
        starts: `[B]`, the first token that each row still holds.
        lengths: `[B]`, the number of tokens appended to each row, and the position of the next one.
        slots: the layout: capacity, block and number of devices.
        window: how far back a query sees, or None: all the way.
        dtype: the dtype of keys and values that are appended and read.
        parallel: the mesh axes over which slots are sharded, and how attention folds.

    Source: one cache shard per device as in Tree Attention (arXiv 2408.04093), section 5; dealt
    in turns as tokens are in Striped Attention (arXiv 2311.09431).

    Examples:
        >>> import functools
        >>> import jax, jax.numpy as jnp
        >>> from energy_attn.distributed import KVCache, SequenceParallel, make_mesh
        >>> @functools.partial(jax.jit, donate_argnums=0)
        ... def step(cache, query, key, value):
        ...     cache = cache.append(key, value)
        ...     return cache, cache.attend(query).out
        >>> q, k = jnp.ones((2, 1, 4, 8)), jnp.ones((2, 1, 2, 8))
        >>> with jax.set_mesh(make_mesh((jax.device_count(),), ("device",))):
        ...     parallel = SequenceParallel("device")
        ...     cache = KVCache.empty(2, 64, 2, 8, dtype=jnp.float32, parallel=parallel, block_size=4)
        ...     for _ in range(3):
        ...         cache, out = step(cache, q, k, k)
        >>> out.shape, cache.lengths.tolist()
        ((2, 1, 4, 8), [3, 3])
    """

    @staticmethod
    def empty(
        batch: int,
        capacity: int,
        kv_heads: int,
        width: int,
        value_width: int | None = None,
        *,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        quantize: Literal["int8"] | None = None,
        window: int | None = None,
        parallel: SequenceParallel | None = None,
        block_size: int = 128,
    ) -> "KVCache":
        """Makes an empty cache on the devices that hold its slots.

        Args:
            batch: the number of rows.
            capacity: the number of tokens that each row has room for, rounded up to whole blocks on
                every device.
            kv_heads: the number of heads of keys and values.
            width: the width of a key.
            value_width: the width of a value; None: `width`.
            dtype: the dtype of keys and values that are appended and read; float16, bfloat16, float32 or float64.
            quantize: `"int8"` stores 8 bits per number and a float32 scale per head and token. The
                error is at most 1/254 of the largest number of that head and token, plus the rounding
                of `dtype`. It cannot be differentiated. While attending, a device may also hold its shard
                in `dtype`. TPUs and NVIDIA's GPUs do not in a decode step without a source, in bfloat16 or float32.
            window: the number of tokens before its own that a query sees, as in
                `local_window_size=(window, 0)`. New tokens overwrite older ones. The capacity has to hold
                the window and the largest append.
            parallel: the axes of the mesh in force over which slots are sharded; None: one device.
            block_size: the number of consecutive tokens on one device.

        Raises:
            TypeError: an argument of another type.
            ValueError: sizes below one, a capacity not above the window, an unknown `quantize`, no
                mesh in force.
        """
        sizes = {"batch": batch, "capacity": capacity, "kv_heads": kv_heads, "width": width}
        sizes["value_width"] = width if value_width is None else value_width
        sizes["block_size"] = block_size
        sizes = {name: checks.check_integer(name, size, least=1) for name, size in sizes.items()}
        kind = checks.check_floating_dtype("dtype", dtype)
        if quantize is not None and quantize != "int8":
            raise ValueError(f"quantize: wanted None or 'int8', got {checks.received(quantize)}")
        slots = slots_for(
            sizes["capacity"], sizes["block_size"], parallel, sizes["batch"], sizes["kv_heads"]
        )
        window = check_room(window, slots)
        shape = batch, slots.capacity, kv_heads
        shapes = (*shape, width), (*shape, sizes["value_width"])
        stored = kind if quantize is None else jnp.dtype(jnp.int8)
        return KVCache(*blank(*shapes, stored, parallel), slots, window, kind, parallel)

    def attend(
        self,
        query: Float[Array, "B T N H"],
        *,
        source: Float[Array, "B T N Hv"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        query_positions: Int[Array, "..."] | None = None,
        mask: Bool[Array, "..."] | AbstractMask | None = None,
        **options: Unpack[MergedScoreOptions],
    ) -> AttentionState:
        r"""The attention of queries over the tokens in the cache.

        $$F(\zeta) = \log \sum_{a \in \text{cache}} \exp(\mathrm{scale}\; q\cdot k_a + \zeta\cdot v_a),
          \qquad \mathrm{out} = \nabla F(\zeta)$$

        By default queries belong to the tokens appended last, so that a decode step is
        `append`, then `attend`. Other quantities of the free energy are methods of the result of `at`.

        Args:
            query: `[B, T, N, H]` in the cache's `dtype`; `K` divides `N`.
            source: the source $\zeta$, `[B, T, N, Hv]`; None means zero.
            lengths: the number of queries of each row that are present, as for `append`.
            query_positions: in place of `lengths`, `[B, T]` integers: the tokens that the queries belong to.
            mask: a mask of [`masks`][energy_attn.kernels.masks.AbstractMask]; or boolean, by slot as
                `keys()`.
            is_causal: whether to hide tokens after the query's own; if not given, True without a mask.
            local_window_size: `(left, right)` or one int: the nearest tokens that are seen; None: the
                cache's window, if it has one.
            **options: as for [`attention`][energy_attn.attention].

        Returns:
            The state over all devices' tokens: `out` in the cache's `dtype`, `lse` in float32
            (float64). A query that sees no token has `out = 0` and `lse = -inf` (the sink, if there is
            one and the query is not absent).

        Raises:
            TypeError: an argument is no array or of another dtype, or an unknown option.
            ValueError: shapes that do not fit the cache, a window wider than the cache's, both
                `lengths` and `query_positions`, or the mesh, as for `append`.
            NotImplementedError: the implementation named declines the call.
        """
        # positions hide the tokens after a query, so that slots need no order
        policy, options = check_scores(options, mask, self.window)
        places = check_queries(query, self.key, self.dtype, self.lengths, lengths, query_positions)
        return self._state(query, places, policy, options, source=source, mask=mask)

    def at(
        self,
        query: Float[Array, "B T N H"],
        *,
        energy: EnergyLike[Measure],
        lengths: Int[Array, " B"] | None = None,
        query_positions: Int[Array, "..."] | None = None,
    ) -> Measure:
        """The measure of queries over the tokens in the cache, on its mesh.

        Arguments and errors are those of `attend`. The energy, a
        [`FreeEnergy`][energy_attn.FreeEnergy], says whether queries are causal; the cache's mesh takes
        the place of its `parallel`. Returns `energy.at(...)`, a [`Gibbs`][energy_attn.Gibbs].

        Examples:
            >>> import jax.numpy as jnp
            >>> import energy_attn as ea
            >>> from energy_attn.distributed import KVCache
            >>> cache = KVCache.empty(1, 64, 2, 8, dtype=jnp.float32)
            >>> cache = cache.append(jnp.ones((1, 5, 2, 8)), jnp.ones((1, 5, 2, 8)))
            >>> F = cache.at(jnp.ones((1, 1, 4, 8)), energy=ea.FreeEnergy())
            >>> bool(jnp.allclose(jnp.exp(F.entropy()), 5))  # five tokens of equal weight
            True
        """
        positions = check_queries(
            query, self.key, self.dtype, self.lengths, lengths, query_positions
        )
        if not isinstance(energy, EnergyLike):
            raise TypeError(
                f"energy: wanted an energy_attn.FreeEnergy, got {checks.received(energy)}"
            )
        reach = check_reach(energy.local_window_size, self.window)
        energy = dataclasses.replace(energy, local_window_size=reach, parallel=self.parallel)
        rows = {"query_positions": positions, "key_positions": self.positions}
        return energy.at(query, self.keys(), self.values(), **rows)

    def fork(self, count: int, *, capacity: int, block_size: int | None = None) -> ForkedCache:
        r"""A cache in which each row becomes `count` rows that share its tokens, for many continuations.

        The tokens are not copied. Row $r$ becomes the rows $r\,\mathrm{count}$ to
        $(r + 1)\,\mathrm{count} - 1$, each with slots of its own for what follows.

        Args:
            count: the number of rows that share the tokens of one.
            capacity: the number of tokens that each has room for after the shared ones, rounded up as for
                `empty`. With a window, its slots are a ring where the capacity is above the window.
            block_size: the number of consecutive tokens of a row on one device; None: as in this cache, or fewer
                where a device holds fewer.

        Raises:
            TypeError: no integers.
            ValueError: numbers below one, or the mesh, as for `append`.
        """
        count = checks.check_integer("count", count, 1)
        capacity = checks.check_integer("capacity", capacity, 1)
        sharding = self._sharding()
        if block_size is None:
            block_size = min(self.slots.block, -(-capacity // self.slots.devices))
        own = KVCache.empty(
            count * len(self.lengths),
            capacity,
            self.key.shape[2],
            self.key.shape[3],
            self.value.shape[3],
            dtype=self.dtype,
            quantize=None if self.key_scale is None else "int8",
            parallel=self.parallel,
            block_size=block_size,
        )
        # two arrays, so that the cache can be donated
        starts, lengths = (repeat_rows(sharding, self.lengths, count) for _ in range(2))
        arrays = own._arrays()._replace(starts=starts, lengths=lengths)
        # a ring buffer that is no larger than the window would overwrite tokens that queries still see
        is_ring = self.window is not None and self.window < own.capacity
        own = own._with(sharding.put(arrays, sharding.arrays))
        return ForkedCache(self, dataclasses.replace(own, window=self.window if is_ring else None))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the cache into a folder of safetensors files, exactly, one file per process.

        All processes call it; each writes the slots on its devices. The files are on disk before their
        index replaces the old one: a save that is killed leaves the old cache or the new one, and the next
        save removes its files. When it returns, any process may load the folder.

        Args:
            path: the folder, which all processes see; made if missing. Files of an earlier `save`, by any
                number of processes, are replaced; others stay.

        Raises:
            TypeError: `path` is no path, or the cache is traced (inside `jax.jit`).
            OSError: a process cannot write, or another save into the folder is not over, as where the
                processes of a job save without [`initialize`][energy_attn.distributed.initialize];
                raised in all of them, and the old cache stays.
        """
        arrays = {name: x for name, x in self._arrays()._asdict().items() if x is not None}
        metadata = {"slots": self.slots, "window": self.window}
        metadata |= {"dtype": self.dtype.name, "stored": self.key.dtype.name}
        write(check_path(path), arrays, metadata)

    @staticmethod
    def load(
        path: str | os.PathLike,
        *,
        parallel: SequenceParallel | None = None,
        capacity: int | None = None,
        block_size: int | None = None,
    ) -> "KVCache":
        """Reads a saved cache onto the mesh in force, which may differ from the mesh of the save.

        Each process reads the tokens of its own devices exactly. If another process saves at the same time,
        each process reads the tokens of one save; processes may read different saves.

        Args:
            path: the folder.
            parallel: as for `empty`.
            capacity: as for `empty`; None: as saved, rounded up to whole blocks on every device.
            block_size: as for `empty`; None: as saved.

        Raises:
            TypeError: an argument of another type.
            ValueError: a folder without a complete cache, or whose files are replaced again and again;
                a file that `save` did not write, by name and before memory of its stated size is allocated;
                a cache of float64 where JAX's 64 bits are off; a capacity below the number of tokens in a row
                (with a window: not above the window); no mesh in force.
        """
        arrays, slots, window, dtype = reload(check_path(path), parallel, capacity, block_size)
        return KVCache(*arrays, slots, window, dtype, parallel)
