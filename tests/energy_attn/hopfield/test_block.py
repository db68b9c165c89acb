"""The Energy Transformer's attention: its energy and update as the paper prints them, in NumPy."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn import masks
from energy_attn.distributed import SequenceParallel, make_mesh, shard_sequence, unshard_sequence
from tests.support.arrays import drawn
from tests.support.compare import close
from tests.support.complaints import a, complains
from tests.support.selection import few, few_rows

B, T, D, HEADS, Y = 2, 16, 6, 2, 3
X = np.random.default_rng(0).standard_normal((B, T, D))


def make(free_energy=None, **options):
    options = {"width": D, "num_heads": HEADS, "head_width": Y, "dtype": "float64", **options}
    block = drawn(ea.hopfield.EnergyAttentionBlock, **options)
    if free_energy is None:
        return block
    own = {"is_leaf": lambda x: isinstance(x, ea.FreeEnergy)}
    return eqx.tree_at(lambda block: block.free_energy, block, free_energy, **own)


def others(length=T):
    return ~np.eye(length, dtype=bool)


def printed(block, x, seen, beta=Y**-0.5):
    """E and -∂E/∂g of one sequence, by the formulas of arXiv 2302.07253; `seen[C, B]`: C sums over B."""
    W_Q, W_K = np.asarray(block.query_weight), np.asarray(block.key_weight)
    energy, update = 0.0, np.zeros_like(x)
    for h in range(HEADS):
        Q, K = x @ W_Q[h].T, x @ W_K[h].T
        weights = np.zeros((len(x), len(x)))  # ω[C, B]
        for C in range(len(x)):
            scores = beta * K[seen[C]] @ Q[C]
            if scores.size:
                total = np.exp(scores).sum()
                energy -= np.log(total) / beta
                weights[C, seen[C]] = np.exp(scores) / total
        for A in range(len(x)):
            for C in range(len(x)):
                update[A] += W_Q[h].T @ K[C] * weights[A, C] + W_K[h].T @ Q[C] * weights[C, A]
    return energy, update


@eqx.filter_jit
def both(block, x, mask=None, lengths=None):
    return block.energy(x, mask=mask, lengths=lengths), block(x, mask=mask, lengths=lengths)


def agrees(found, block, x, seen, beta=Y**-0.5):
    for energy, update, one, visible in zip(*found, x, seen, strict=True):
        wanted = printed(block, one, visible, beta)
        close((energy, update), wanted, tolerance=1e-12)


POSITION = np.arange(T)
AHEAD = POSITION[:, None] - POSITION  # C - B


@pytest.mark.smoke
def test_what_a_token_sees():
    """Lengths, masks and windows that let a token see itself or an absent one, or count a key twice."""
    windowed = make(free_energy=ea.FreeEnergy(local_window_size=(3, 1)))
    mask = np.random.default_rng(1).random((B, 1, T, T)) < 0.7
    mask[0, 0, 5] = False  # a token that sees none
    lengths = np.asarray([T, 7], np.int32)
    window = (AHEAD <= 3) & (AHEAD >= -1) & others()
    present = [(POSITION < length) for length in lengths]
    seen = [window & m & p[:, None] & p for m, p in zip(mask[:, 0], present, strict=True)]
    agrees(both(windowed, X, mask, lengths), windowed, X, seen)


@pytest.mark.full
def test_causality_and_nobody():
    """Causality that shows what follows; NaN in the update where there is nobody to see at all, or an energy."""
    causal = make(free_energy=ea.FreeEnergy(is_causal=True, scale=0.7), exclude_self=False)
    agrees(both(causal, jnp.asarray(X)), causal, X, [AHEAD >= 0] * B, 0.7)
    unbatched = both(causal, jnp.asarray(X[0]))
    agrees([x[None] for x in unbatched], causal, X[:1], [AHEAD >= 0], 0.7)
    one_side = make(free_energy=ea.FreeEnergy(local_window_size=(None, 1)))
    agrees(both(one_side, jnp.asarray(X)), one_side, X, [(AHEAD >= -1) & others()] * B)
    alone = make(free_energy=ea.FreeEnergy(local_window_size=0))
    for block, x in ((make(), X[:, :1]), (alone, X[:, :4])):
        energy, update = both(block, jnp.asarray(x))
        assert energy.shape == (B,) and not energy.any() and not update.any()


@pytest.mark.parametrize("exclude_self", few([True, False], True))
def test_rules(exclude_self):
    """A mask that is taken for the positions of one pass, counted from the end; that shows a token to itself; or one of
    the call that takes the place of the energy's.
    """
    own = ea.FreeEnergy(mask=~masks.Prefix(1))
    block = make(exclude_self=exclude_self, free_energy=own)
    rule = masks.Prefix(jnp.asarray([3, 5])) | masks.Window(2, 0)
    lengths = np.asarray([T, 9], np.int32)
    found = both(block, jnp.asarray(X), rule, jnp.asarray(lengths))
    shown = [(POSITION > 0) & ((POSITION < n) | ((AHEAD >= 0) & (AHEAD <= 2))) for n in (3, 5)]
    seen = [x & np.outer(p, p) for x, p in zip(shown, POSITION < lengths[:, None], strict=True)]
    agrees(found, block, X, [x & others() if exclude_self else x for x in seen])


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "explicit"), few_rows([("zigzag", False), ("contiguous", True)])
)
def test_spread_over_devices(layout, explicit):
    """Tokens on other devices that are not seen, or order that a layout hides; in the energy and the update."""
    parallel = SequenceParallel(("node", "device"), layout=layout)
    block = make(free_energy=ea.FreeEnergy(parallel=None if explicit else parallel))
    lengths = np.asarray([T, 9], np.int32)
    mesh = make_mesh((2, 4), explicit=explicit)
    with jax.set_mesh(mesh):
        if explicit:
            x = jax.device_put(X, NamedSharding(mesh, P(None, ("node", "device"))))
        else:
            x = shard_sequence(jnp.asarray(X), parallel)
        energy, update = both(block, x, None, jnp.asarray(lengths))
        update = unshard_sequence(update, parallel)
    seen = [others() & np.outer(p, p) for p in np.arange(T) < lengths[:, None]]
    agrees((energy, update), block, X, seen)


@pytest.mark.full
def test_sixteen_bits():
    """Energies rounded to 16 bits."""
    block = make(dtype="bfloat16")
    x = jnp.asarray(X, jnp.bfloat16)
    energy, update = both(block, x)
    assert energy.dtype == update.dtype == jnp.float32
    x = np.asarray(x, np.float64)
    wide = jax.tree.map(lambda w: w.astype("float64"), block)
    wanted = printed(wide, x[0], others())
    np.testing.assert_allclose(energy[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(update[0], wanted[1], atol=1e-5)


@pytest.mark.usefixtures("unchecked", "user_settings")
@pytest.mark.parametrize(
    ("changes", "error", "got", "wanted"),
    [
        ({"width": 2.0}, TypeError, "float 2.0", "integer"),
        ({"width": 1}, ValueError, "1", "at least 2"),
        ({"num_heads": 0}, ValueError, "0", "at least 1"),
        ({"head_width": 0}, ValueError, "0", "at least 1"),
        ({"exclude_self": 1}, TypeError, "int 1", "True or False"),
        ({"free_energy": 3}, TypeError, "int 3", "FreeEnergy"),
        ({"dtype": "int32"}, TypeError, "int32", "float32"),
        ({"key": 0}, TypeError, "int 0", "jax.random.key"),
    ],
)
def test_bad_fields(changes, error, got, wanted):
    """A block of impossible sizes that fails when it is called, or later."""
    (name,) = changes
    valid = {"width": 8, "num_heads": 2, "key": jax.random.key(0)}
    make = functools.partial(ea.hopfield.EnergyAttentionBlock, **valid | changes)
    complains(make, error, name, got, wanted)


@pytest.mark.usefixtures("unchecked", "user_settings")
def test_bad_calls():
    """Tokens of another width, and temperatures below zero."""
    block = drawn(ea.hopfield.EnergyAttentionBlock, width=8, num_heads=2)
    complains(lambda: block(a(3, 7)), ValueError, "x", "float32[3,7]", "(B, T, 8) or (T, 8)")
    complains(lambda: block(a(3, 8, dtype="int32")), TypeError, "x", "int32[3,8]", "float32")
    lengths = {"lengths": a(3, dtype="int32")}
    complains(lambda: block(a(2, 3, 8), **lengths), ValueError, "lengths", "int32[3]", "(2)")
    key = jax.random.key(0)
    for scale, got in ((-1.0, "-1.0"), (jnp.asarray(0.0), "0.0")):
        energy = ea.FreeEnergy(scale=scale)
        complains(
            lambda energy=energy: ea.hopfield.EnergyAttentionBlock(
                8, 2, free_energy=energy, key=key
            ),
            ValueError,
            "free_energy.scale",
            got,
            "above 0",
        )
