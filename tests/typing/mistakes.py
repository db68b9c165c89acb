"""Mistakes that a type checker is to find, each on a line that ends in a mark; `tools/check_types.py` runs it.

Never imported. The other lines are right, and must stay without complaint.
"""

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

ea.nothing  # mistake
ea.FreeEnergy(causal=True)  # mistake
ea.FreeEnergy(local_window_size="3")  # mistake
ea.FreeEnergy(key_value_seq_lengths=lengths)  # mistake
energy(q, k, v, sauce=q)  # mistake
energy(q, k, v, is_causal=False)  # mistake
energy.attention(q, k, v, return_energy=True).sum()  # mistake
energy.atention(q, k, v)  # mistake
energy.at(q, k)  # mistake
energy.at(q, k, v, lengths=lengths)  # mistake
energy.at(q, k, v, mask=0.5)  # mistake
F.entropie()  # mistake
F.attention(return_energy=True).sum()  # mistake
F.covariance(tangents=q)  # mistake
F.cumulant(3)  # mistake
F.sample(3)  # mistake
F.score_moments().median  # mistake
F | 0.5  # mistake
ea.nn.MultiheadAttention(4, 16, is_casual=True, key=jax.random.key(0))  # mistake
ea.nn.MultiheadAttention(4, 16, energy="reference", key=jax.random.key(0))  # mistake
layer(q, k, v, return_energy=True).sum()  # mistake
layer(q, k, v, query_position=lengths)  # mistake

# solvers
found = F.rate(q, solver=ea.solvers.Newton(max_steps=8), throw=False)
found.value.sum() + F.map(regulariser=0.1, solver=ea.solvers.Mirror()).value.sum()
ea.hopfield.retrieve(q, k, solver=ea.solvers.FixedPoint(tolerance=1e-3), query_seq_lengths=lengths)

F.rate(q, solver="newton")  # mistake
F.rate(q, solver=ea.solvers.Mirror())  # mistake
F.rate(q, max_steps=8)  # mistake
F.map(q)  # mistake
F.map(regularizer=0.1)  # mistake
ea.solvers.Newton(max_step=8)  # mistake
found.point.values  # mistake
ea.hopfield.retrieve(q, k, solver="fixed_point")  # mistake
ea.hopfield.retrieve(q, k, lengths=lengths)  # mistake

# masks
rule = ea.masks.Causal() & ~ea.masks.Prefix(3) | ea.masks.Window(3, None)
ea.attention(q, k, v, mask=rule & ea.masks.Lengths(lengths), local_window_size=(None, 0))
ea.FreeEnergy(mask=rule).at(q, k, v, mask=jnp.ones((1, 1, 8, 8), bool))
near = ea.masks.Function(lambda query, key, reach: query - key < reach, 3)

ea.attention(q, k, v, mask="causal")  # mistake
ea.attention(q, k, v, mask=ea.masks.Causal)  # mistake
ea.attention(q, k, v, mask=ea.masks.Casual())  # mistake
ea.masks.Window(3, 0, 1)  # mistake
ea.masks.Window(left=3, rigth=0)  # mistake
ea.masks.Causal(3)  # mistake
ea.masks.Lengths(lengths, lengths)  # mistake
ea.masks.Segments()  # mistake
ea.masks.Function(3)  # mistake
rule & jnp.ones((8, 8), bool)  # mistake
not rule  # mistake
ea.masks.Not(None)  # mistake
rule.visible(lengths)  # mistake
rule.any_visible(lengths, lengths)  # mistake

# options
ea.attention(q, k, v, is_casual=True)  # mistake
ea.attention(q, k, v, is_causal="yes")  # mistake
ea.attention(q, k, v, local_window_size=[3, 0])  # mistake
ea.attention(q, k, v, parallel="device")  # mistake
ea.free_energy(q, k, v, key_seq_lengths=lengths)  # mistake
ea.free_energy(q, k, v, scale="1")  # mistake
ea.free_energy(q, k, v, implementation=3)  # mistake
ea.free_energy(q, k, v, key_value_seq_lengths=[3, 8])  # mistake
ea.free_energy(q, k, v, bias=0.5)  # mistake
local_attention(q, k, v, parallel=parallel)  # mistake
sharded_attention(q, k, v, axis_name="device", querys_sharded=True)  # mistake
sharded_attention(q, k, v, axis_name="device", window=3)  # mistake
methods.Tree("star")  # mistake
sharded_attention(q, k, v)  # mistake
sharded_attention(q, k, v, axis_name="device", is_causal=None)  # mistake

# results
out, energies, residual = ea.attention(q, k, v, return_energy=True)  # mistake
ea.attention(q, k, v, return_energy=False)["out"].out  # mistake
ea.attention(q, k, v, return_energy=True).sum()  # mistake
ea.free_energy(q, k, v).lse  # mistake
local_attention(q, k, v).energy  # mistake

# a cache
cache = KVCache.empty(2, 64, 4, 16, parallel=parallel)
state = cache.append(k, v, lengths=lengths).attend(q, local_window_size=5)
cache.at(q, energy=energy).entropy().sum()
cache.at(q)  # mistake
cache.at(q, energy=0.5)  # mistake
cache.at(q, energy=energy).entropie()  # mistake
cache.attend(q, key_positions=lengths)  # mistake
cache.attend(q, is_causal=1.0)  # mistake
cache.attend(q, source=0.5)  # mistake
cache.apend(k, v)  # mistake
cache.append(k)  # mistake
KVCache.empty(2, 64, 4, 16, quantize="int4")  # mistake
cache.reset(lengths).replace(lengths, cache).fork(2, capacity=8).append(k, v).attend(q, sink=q)
cache.replace(lengths)  # mistake
cache.fork(2)  # mistake
cache.fork(2, capacity=8).attend(q, mask=None)  # mistake
