"""The published energies of docs/energies.md: its own code against dense formulas and PyTorch's flex_attention."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.distributed import KVCache, SequenceParallel, make_mesh
from tests.support.compare import close
from tests.support.published import FORMULAS, HEADS, LENGTH, WIDTH, dense, page_energies
from tests.support.selection import few_rows

ROWS = "query", "key", "value"


@pytest.fixture(scope="module")
def page():
    """The page's energies, with types and ranks that are joined as NumPy joins them."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield page_energies()


def both(name, page, **options):
    """An input in float64, and the functions from it to `(out, energy)` by the library and by the formula."""
    formula, (_, _, energy) = FORMULAS[name], page[name]
    drawn = np.random.default_rng(7).standard_normal((3, 2, LENGTH, HEADS, WIDTH))
    drawn[0] *= 3  # so that a bound on the scores is felt
    if formula.unit:
        drawn[:2] /= np.linalg.norm(drawn[:2], axis=-1, keepdims=True)
    learnt, static = eqx.partition(dataclasses.replace(energy, **options), eqx.is_inexact_array)

    def ours(x):
        energy = eqx.combine(x["energy"], static)
        return energy.attention(*(x[name] for name in ROWS), return_energy=True)

    def exact(x):
        return dense(formula, x["query"], x["key"], x["value"], jax.tree.leaves(x["energy"]))

    return dict(zip(ROWS, map(jnp.asarray, drawn), strict=True)) | {"energy": learnt}, ours, exact


def gradient(f):
    """The function from an input to a state of `f`, and to the gradients of a number that depends on all of it."""

    def number(x):
        state = f(x)
        return jnp.sin(state[0]).sum() + jnp.cos(state[1]).sum(), state

    return jax.value_and_grad(number, has_aux=True)


def on_one_device(name, page):
    """Values and gradients, their derivatives in a direction, and so products of a Hessian."""
    x, ours, exact = both(name, page)
    u = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size) + 1.0).reshape(a.shape), x)
    return [jax.jit(lambda f=f: jax.jvp(gradient(f), (x,), (u,)))() for f in (ours, exact)]


def on_a_mesh(name, page):
    """Values and gradients with the keys over eight devices."""
    x, ours, exact = both(name, page, parallel=SequenceParallel("device"))
    with jax.set_mesh(make_mesh((8,), ("device",))):
        found = jax.jit(gradient(ours))(x)
    return found, jax.jit(gradient(exact))(x)


def in_a_cache(name, page):
    """The last tokens, decoded from a cache over eight devices."""
    x, _, exact = both(name, page)
    with jax.set_mesh(make_mesh((8,), ("device",))):
        parallel = SequenceParallel("device")
        cache = KVCache.empty(2, LENGTH + 8, HEADS, WIDTH, dtype=float, parallel=parallel)
        cache = cache.append(x["key"], x["value"])

        @jax.jit
        def decode(cache, query):
            return cache.at(query, energy=page[name][2]).attention(return_energy=True)

        found = decode(cache, x["query"][:, -4:])
    return found, jax.tree.map(lambda a: a[:, -4:], jax.jit(exact)(x))


# What a mesh or a cache could take for something else: a function of products, a table of pairs of positions, an
# array of batch, position and head, masks of positions and of batches, and a sink. Other formulas have one of these.
STRUCTURES = "gemma2", "graphormer", "forgetting", "longformer", "documents", "gpt_oss"


WAYS = [
    (in_a_cache, "forgetting"),
    *((on_one_device, name) for name in FORMULAS),
    *((way, name) for way in (on_a_mesh, in_a_cache) for name in STRUCTURES),
]


@pytest.mark.parametrize(("way", "name"), few_rows(list(dict.fromkeys(WAYS))))
def test_each_way(way, name, page):
    """A score, a mask or a sink that is another one than published; positions of one device, or slots, for all."""
    close(*way(name, page))


def test_page(page):
    """A variant that is not compared, that takes more lines than are said, or has no paper."""
    assert list(page) == list(FORMULAS)
    lines = [len([x for x in code.splitlines() if x.strip()]) for code, _, _ in page.values()]
    assert max(lines) <= 13 and sorted(lines)[2 * len(lines) // 3] <= 5
    assert all(link for _, link, _ in page.values())


@pytest.mark.full
@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention(name, page):
    """Another function than PyTorch's of the same score and mask; by its gradients, too."""
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    # on CPU `flex_attention` refuses to differentiate; this is what it runs when it is not compiled
    from torch._higher_order_ops.flex_attention import math_attention

    formula = FORMULAS[name]
    x, ours, _ = both(name, page)

    def number(x):
        out = ours(x)[0]
        return jnp.sin(out).sum(), out

    (found, out), slopes = jax.jit(jax.value_and_grad(number, has_aux=True))(x)
    leaves, tree = jax.tree.flatten(x)
    tensors = [torch.tensor(np.asarray(a)).requires_grad_() for a in leaves]
    given = jax.tree.unflatten(tree, tensors)
    rows = [given[part].transpose(1, 2) for part in ROWS]
    parameters = jax.tree.leaves(given["energy"])
    *parameters, sink = parameters if formula.sink else (*parameters, None)

    def score(s, b, h, i, j):
        return formula.score(torch, s, b, h, i, j, parameters)

    def seen(b, h, i, j):
        return formula.seen(torch, b, i, j) if formula.seen else i == i

    blocks = flex.create_block_mask(seen, 2, None, LENGTH, LENGTH, device="cpu")
    theirs, lse, _ = math_attention(*rows, score, blocks.as_tuple(), formula.scale, {})
    if sink is None:
        with torch.no_grad():
            still = [a.detach() for a in rows]
            public = flex.flex_attention(*still, score, blocks, formula.scale)
        assert torch.equal(public, theirs)
    else:  # a power of two, before `flex_attention` returns it
        theirs = theirs * torch.sigmoid(lse * np.log(2) - sink[:, None])[..., None]
    theirs = theirs.transpose(1, 2)
    total = theirs.sin().sum()
    total.backward()
    gradients = jax.tree.unflatten(tree, [a.grad.numpy() for a in tensors])
    close((out, found, slopes), (theirs.detach().numpy(), total.item(), gradients))
