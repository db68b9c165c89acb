"""Mistakes that a type checker is to find, each on a line that ends in `# pyright: ignore`.

Never imported. Pyright reports a comment on a line without a mistake, and mistakes on the other lines.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error, reportUnusedExpression=false

import jax
import jax.numpy as jnp

import energy_attn as ea
from energy_attn.distributed import KVCache, SequenceParallel, methods, sharded_attention
from energy_attn.kernels import local_attention

q = k = v = jnp.ones((2, 8, 4, 16))
lengths = jnp.array([3, 8])
parallel = SequenceParallel("device")

# what is called as it should be
out: jax.Array = ea.attention(q, k, v, is_causal=True, scale=jnp.float32(0.5))
out, energies = ea.attention(q, k, v, key_value_seq_lengths=lengths, return_energy=True)
out, residual = ea.attention(q, k, v, parallel=parallel, return_residual=True)
ea.free_energy(q, k, v, local_window_size=(3, 0), implementation=("blockwise", "reference"))
local_attention(q, k, v, query_positions=None, key_positions=None).lse.sum()

# an energy, and what is asked of the measure that it makes
energy = ea.FreeEnergy(is_causal=True, implementation=["blockwise", "reference"])
F = energy.at(q, k, v, key_value_seq_lengths=lengths)
energy(q, k, v, source=q).sum()
out, energies = energy.attention(q, k, v, return_energy=True)
F.tilt(q).attention().sum() + F.covariance(q).sum() + F.entropy().sum()
layer = ea.nn.MultiheadAttention(4, 16, is_causal=True, key=jax.random.key(0))
out, energies = layer(q[0, :, 0], q[0, :, 0], q[0, :, 0], return_energy=True)

ea.nothing  # pyright: ignore
ea.FreeEnergy(causal=True)  # pyright: ignore
ea.FreeEnergy(local_window_size="3")  # pyright: ignore
ea.FreeEnergy(key_value_seq_lengths=lengths)  # pyright: ignore
energy(q, k, v, sauce=q)  # pyright: ignore
energy(q, k, v, is_causal=False)  # pyright: ignore
energy.attention(q, k, v, return_energy=True).sum()  # pyright: ignore
energy.atention(q, k, v)  # pyright: ignore
energy.at(q, k)  # pyright: ignore
energy.at(q, k, v, lengths=lengths)  # pyright: ignore
energy.at(q, k, v, mask=0.5)  # pyright: ignore
F.entropie()  # pyright: ignore
F.attention(return_energy=True).sum()  # pyright: ignore
F.covariance(tangents=q)  # pyright: ignore
F.cumulant(3)  # pyright: ignore
F.sample(3)  # pyright: ignore
F.score_moments().median  # pyright: ignore
F | 0.5  # pyright: ignore
ea.nn.MultiheadAttention(4, 16, is_casual=True, key=jax.random.key(0))  # pyright: ignore
ea.nn.MultiheadAttention(4, 16, energy="reference", key=jax.random.key(0))  # pyright: ignore
layer(q, k, v, return_energy=True).sum()  # pyright: ignore
layer(q, k, v, query_position=lengths)  # pyright: ignore

# solvers
found = F.rate(q, solver=ea.solvers.Newton(max_steps=8), throw=False)
found.value.sum() + F.map(regulariser=0.1, solver=ea.solvers.Mirror()).value.sum()
ea.hopfield.retrieve(q, k, solver=ea.solvers.FixedPoint(tolerance=1e-3), query_seq_lengths=lengths)

F.rate(q, solver="newton")  # pyright: ignore
F.rate(q, solver=ea.solvers.Mirror())  # pyright: ignore
F.rate(q, max_steps=8)  # pyright: ignore
F.map(q)  # pyright: ignore
F.map(regularizer=0.1)  # pyright: ignore
ea.solvers.Newton(max_step=8)  # pyright: ignore
found.point.values  # pyright: ignore
ea.hopfield.retrieve(q, k, solver="fixed_point")  # pyright: ignore
ea.hopfield.retrieve(q, k, lengths=lengths)  # pyright: ignore

# masks
rule = ea.masks.Causal() & ~ea.masks.Prefix(3) | ea.masks.Window(3, None)
ea.attention(q, k, v, mask=rule & ea.masks.Lengths(lengths), local_window_size=(None, 0))
ea.FreeEnergy(mask=rule).at(q, k, v, mask=jnp.ones((1, 1, 8, 8), bool))
near = ea.masks.Function(lambda query, key, reach: query - key < reach, 3)

ea.attention(q, k, v, mask="causal")  # pyright: ignore
ea.attention(q, k, v, mask=ea.masks.Causal)  # pyright: ignore
ea.attention(q, k, v, mask=ea.masks.Casual())  # pyright: ignore
ea.masks.Window(3, 0, 1)  # pyright: ignore
ea.masks.Window(left=3, rigth=0)  # pyright: ignore
ea.masks.Causal(3)  # pyright: ignore
ea.masks.Lengths(lengths, lengths)  # pyright: ignore
ea.masks.Segments()  # pyright: ignore
ea.masks.Function(3)  # pyright: ignore
rule & jnp.ones((8, 8), bool)  # pyright: ignore
not rule  # pyright: ignore
ea.masks.Not(None)  # pyright: ignore
rule.visible(lengths)  # pyright: ignore
rule.any_visible(lengths, lengths)  # pyright: ignore

# options
ea.attention(q, k, v, is_casual=True)  # pyright: ignore
ea.attention(q, k, v, is_causal="yes")  # pyright: ignore
ea.attention(q, k, v, local_window_size=[3, 0])  # pyright: ignore
ea.attention(q, k, v, parallel="device")  # pyright: ignore
ea.free_energy(q, k, v, key_seq_lengths=lengths)  # pyright: ignore
ea.free_energy(q, k, v, scale="1")  # pyright: ignore
ea.free_energy(q, k, v, implementation=3)  # pyright: ignore
ea.free_energy(q, k, v, key_value_seq_lengths=[3, 8])  # pyright: ignore
ea.free_energy(q, k, v, bias=0.5)  # pyright: ignore
local_attention(q, k, v, parallel=parallel)  # pyright: ignore
sharded_attention(q, k, v, axis_name="device", querys_sharded=True)  # pyright: ignore
sharded_attention(q, k, v, axis_name="device", window=3)  # pyright: ignore
methods.Tree("star")  # pyright: ignore
sharded_attention(q, k, v)  # pyright: ignore
sharded_attention(q, k, v, axis_name="device", is_causal=None)  # pyright: ignore

# results
out, energies, residual = ea.attention(q, k, v, return_energy=True)  # pyright: ignore
ea.attention(q, k, v, return_energy=False)["out"].out  # pyright: ignore
ea.attention(q, k, v, return_energy=True).sum()  # pyright: ignore
ea.free_energy(q, k, v).lse  # pyright: ignore
local_attention(q, k, v).energy  # pyright: ignore

# a cache
cache = KVCache.empty(2, 64, 4, 16, parallel=parallel)
state = cache.append(k, v, lengths=lengths).attend(q, local_window_size=5)
cache.at(q, energy=energy).entropy().sum()
cache.at(q)  # pyright: ignore
cache.at(q, energy=0.5)  # pyright: ignore
cache.at(q, energy=energy).entropie()  # pyright: ignore
cache.attend(q, key_positions=lengths)  # pyright: ignore
cache.attend(q, is_causal=1.0)  # pyright: ignore
cache.attend(q, source=0.5)  # pyright: ignore
cache.apend(k, v)  # pyright: ignore
cache.append(k)  # pyright: ignore
KVCache.empty(2, 64, 4, 16, quantize="int4")  # pyright: ignore
cache.reset(lengths).replace(lengths, cache).fork(2, capacity=8).append(k, v).attend(q, sink=q)
cache.replace(lengths)  # pyright: ignore
cache.fork(2)  # pyright: ignore
cache.fork(2, capacity=8).attend(q, mask=None)  # pyright: ignore
