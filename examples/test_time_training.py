"""Test-time training of a small language model, whose weights move at each chunk of tokens.

After the description of TTT-E2E (arXiv 2512.23675): blocks of plain causal attention, then blocks of a sliding window,
each with an MLP whose weights take one gradient step on the loss of a chunk before the next chunk is read. The outer
loss is the mean over chunks, so its gradient contains second derivatives of attention. Each sequence follows a table of
successors of its own, which a window is too short to hold. `docs/second_order.md` explains the script.

    python examples/test_time_training.py --steps 300 --lengths 1024 4096 16384 --out FILE
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

# Before JAX starts: eight simulated devices where there is no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import SequenceParallel, make_mesh

TOKENS, ROWS, LENGTH = 64, 4, 256  # of the vocabulary, of a batch


# --8<-- [start:attention]
# Two functions: causal attention, and that of a chunk, from position `start` on, to itself and the chunk before it.
def by_array(attend, **options):
    """The window as a boolean array, in a call that `jax.nn` has, too."""

    def chunk(query, key, value, start):
        size = len(query)
        row, column = jnp.arange(size)[:, None], jnp.arange(2 * size)
        seen = (row < column) & (column <= row + size) & (column >= size - start)
        return attend(query, key, value, mask=seen[None], **options)

    return partial(attend, is_causal=True, **options), chunk


def by_window(**options):
    """The window as a mask of positions: no array, and blocks outside are skipped."""

    def chunk(query, key, value, start):
        size = len(query)
        at = start - size + jnp.arange(2 * size)  # < 0: absent
        at = {"query_positions": at[size:], "key_positions": at}
        return ea.attention(query, key, value, mask=masks.Window(size - 1, 0), **at, **options)

    return partial(ea.attention, is_causal=True, **options), chunk
    # --8<-- [end:attention]


ATTENTIONS = {
    "energy_attn": by_array(ea.attention),
    "energy_attn, masks.Window": by_window(),
    "jax.nn": by_array(jax.nn.dot_product_attention),
}


def normalised(x):
    """RMS normalisation."""
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def rotated(x):
    """Rotary embedding of `[T, N, H]`."""
    half = x.shape[-1] // 2
    rates = 100.0 ** -(jnp.arange(half, dtype=x.dtype) / half)
    angles = jnp.arange(len(x), dtype=x.dtype)[:, None, None] * rates
    a, b, cos, sin = x[..., :half], x[..., half:], jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


# --8<-- [start:model]
def mlp(weights, x):
    """Two layers."""
    return jax.nn.gelu(x @ weights[0]) @ weights[1]


class Block(eqx.Module):
    """Attention and an MLP, whose weights no inner step moves."""

    project: jax.Array
    join: jax.Array
    mlp: list[jax.Array]

    def __call__(self, x, attend, past=None, fast=None):
        """The output for `x`, `[T, width]`, and its keys and values, which the next chunk takes as `past`."""
        query, *new = jnp.einsum("td,cdnh->ctnh", normalised(x), self.project)
        key, value = new
        if past is not None:
            key, value = map(jnp.concatenate, zip(past, new, strict=True))
            query = jnp.concatenate([jnp.zeros_like(query), query])
        out = attend(rotated(query)[-len(x) :], rotated(key), value)
        y = normalised(x := x + jnp.einsum("tnh,nhd->td", out, self.join))
        return x + mlp(self.mlp, y) + (0 if fast is None else mlp(fast, y)), new


class Model(eqx.Module):
    """A prefix, a suffix, and the MLPs of the suffix that each sequence moves."""

    embedding: jax.Array
    prefix: list[Block]
    suffix: list[Block]
    fast: list[list[jax.Array]]
    log_rate: jax.Array
    chunk: int = eqx.field(static=True)

    def losses(self, tokens, attention):
        """The loss of each chunk of `tokens`, with weights that the chunks before it moved."""
        (causal, near), x = attention, self.embedding[tokens[:-1]]
        for block in self.prefix:
            x, _ = block(x, causal)
        start = jnp.arange(0, len(x), self.chunk)
        x, targets = (y.reshape(-1, self.chunk, *y.shape[1:]) for y in (x, tokens[1:]))

        def loss(fast, past, start, x, targets):
            attend, new = partial(near, start=start), []
            for block, moved, old in zip(self.suffix, fast, past, strict=True):
                x, pair = block(x, attend, old, moved)
                new.append(pair)
            logits = jax.nn.log_softmax(normalised(x) @ self.embedding.T)
            return -jnp.take_along_axis(logits, targets[:, None], 1).mean(), new

        @jax.checkpoint
        def step(carry, chunk):
            fast, past = carry
            (value, past), slope = jax.value_and_grad(loss, has_aux=True)(fast, past, *chunk)
            fast = jax.tree.map(lambda w, g: w - jnp.exp(self.log_rate) * g, fast, slope)
            return (fast, past), value

        nothing = jnp.zeros((self.chunk, *self.suffix[0].join.shape[:2]), x.dtype)
        begin = self.fast, [[nothing, nothing]] * len(self.suffix)
        return lax.scan(step, begin, (start, x, targets))[1]
        # --8<-- [end:model]


def make_model(key, width=64, heads=2, blocks=(1, 1), chunk=32, rate=1.0):
    """A model with random weights."""
    keys, size = iter(jax.random.split(key, 1 + 6 * sum(blocks))), width // heads

    def drawn(fan_in, *shape):
        return jax.random.normal(next(keys), shape) * fan_in**-0.5

    def layers():
        return [drawn(width, width, 4 * width), drawn(16 * width, 4 * width, width)]

    def block():
        project = drawn(width, 3, width, heads, size)
        return Block(project, drawn(width, heads, size, width), layers())

    prefix, suffix = ([block() for _ in range(count)] for count in blocks)
    embedding, fast = drawn(width, TOKENS, width), [layers() for _ in suffix]
    return Model(embedding, prefix, suffix, fast, jnp.log(rate), chunk)


def mean_loss(model, rows, attention):
    """The outer loss of rows of tokens, and the mean loss of each chunk."""
    losses = jax.vmap(partial(model.losses, attention=attention))(rows).mean(0)
    return losses.mean(), losses


outer_gradient = jax.grad(mean_loss, has_aux=True)


@partial(jax.jit, static_argnums=(1, 2))
def draw(key, rows, length):
    """Sequences with random successors of each token, and every tenth token drawn anew."""
    tables, noise = jax.random.split(key)
    tables = jax.vmap(lambda x: jax.random.permutation(x, TOKENS))(jax.random.split(tables, rows))

    def following(token, key):
        anew, other = jax.random.bernoulli(key, 0.1, rows), jax.random.randint(key, rows, 0, TOKENS)
        token = jnp.where(anew, other, tables[jnp.arange(rows), token])
        return token, token

    return lax.scan(following, tables[:, 0], jax.random.split(noise, length))[1].T


def train(attention, steps, moving=True):
    """The losses of chunks in each step of the outer training; `moving`: by inner steps."""
    model, losses = make_model(jax.random.key(0), rate=1.0 if moving else 0.0), []
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    state = optimiser.init(eqx.filter(model, eqx.is_array))

    @jax.jit
    def step(model, state, key):
        slope, losses = outer_gradient(model, draw(key, ROWS, LENGTH + 1), attention)
        updates, state = optimiser.update(slope, state)
        return eqx.apply_updates(model, updates), state, losses

    for key in jax.random.split(jax.random.key(1), steps):
        model, state, found = step(model, state, key)
        losses.append(found)
    return np.asarray(losses)


def measure(length, repeats=5):
    """Temporary MiB of the gradient of one sequence's outer loss, and its median seconds."""
    model = make_model(jax.random.key(0), width=256, heads=4, chunk=min(1024, length // 4))
    args, programs, sizes = (model, draw(jax.random.key(1), 1, length + 1)), {}, {}
    for name, attention in ATTENTIONS.items():
        programs[name] = jax.jit(outer_gradient, static_argnums=2).lower(*args, attention).compile()
        sizes[name] = round(programs[name].memory_analysis().temp_size_in_bytes / 2**20)
    seconds = {name: [] for name in programs}
    for _ in range(repeats + 1 if length <= 4096 else 0):
        for name, compiled in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            seconds[name].append(time.perf_counter() - began)
    medians = {name: float(np.median(x[1:]).round(3)) for name, x in seconds.items() if x}
    return {"MiB": sizes, "seconds": medians}


def main(arguments: list[str] | None = None) -> int:
    """Trains with and without inner steps, prints the losses, and writes the measurements; returns 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    option = parser.add_argument
    option("--steps", type=int, default=40, help="of the outer training (%(default)s)")
    option("--sharded", action="store_true", help="chunks over all devices")
    option("--lengths", type=int, nargs="*", default=[], help="whose step is measured")
    option("--out", type=Path, help="file for the results")
    args = parser.parse_args(arguments)
    devices, result = jax.devices()[: None if args.sharded else 1], {"steps": args.steps}
    with jax.set_mesh(make_mesh((len(devices),), ("sequence",), devices=devices)):
        attention = by_array(ea.attention, parallel=SequenceParallel("sequence"))
        for name, moving in (("inner steps", True), ("no inner steps", False)):
            losses = train(attention, args.steps, moving)[-20:].mean(0)
            result[name] = [round(float(x), 2) for x in losses]
            print(f"{name}: losses of chunks, in nats", result[name])
    for length in args.lengths:
        result[str(length)] = measure(length)
        print(length, json.dumps(result[str(length)]))
    if args.out:
        args.out.write_text(json.dumps({"jax": jax.__version__, **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
