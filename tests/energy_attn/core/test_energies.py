"""The published energies of docs/energies.md: its own code against dense formulas and PyTorch's flex_attention."""

import json

import compare_energies
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare_energies import exact
from dense_energies import FORMULAS, LENGTH, TABLES

from tests.support.compare import close
from tests.support.selection import few_rows


@pytest.fixture(scope="module")
def energies():
    with exact():
        return compare_energies.energies()


# What a mesh or a cache could take for something else: a function of products, a table of pairs of positions, an
# array of batch, position and head, masks of positions and of batches, and a sink. Other formulas have one of these.
STRUCTURES = "gemma2", "graphormer", "forgetting", "longformer", "documents", "gpt_oss"


WAYS = [
    ("in_a_cache", "forgetting"),
    *(("on_one_device", name) for name in FORMULAS),
    *((way, name) for way in ("on_a_mesh", "in_a_cache") for name in STRUCTURES),
]


@pytest.mark.parametrize(("way", "name"), few_rows(list(dict.fromkeys(WAYS))))
def test_each_way(way, name, energies):
    """A score, a mask or a sink that is another one than published; positions of one device, or slots, for all."""
    with exact():
        found = getattr(compare_energies, way)(energies[name], FORMULAS[name])
    for pair in found.values() if isinstance(found, dict) else [found]:
        close(*pair)


def test_page():
    """A variant that is not compared, that takes more lines than are said, or has no paper."""
    found = [x for x in compare_energies.sections() if x[0]]
    codes = [code for _, _, blocks in found for code in blocks]
    assert [compare_energies.assigned(code) for code in codes] == list(FORMULAS)
    assert len(codes) >= 20
    lines = [len([line for line in code.splitlines() if line.strip()]) for code in codes]
    assert max(lines) <= 13 and sorted(lines)[2 * len(lines) // 3] <= 5
    assert all(link.startswith("https://") for _, link, _ in found)


def test_table():
    """A table of what works that is not what the script found."""
    found = json.loads(compare_energies.FILE.read_text())
    page = compare_energies.PAGE.read_text()
    shown = page.partition("<!-- tools/compare_energies.py -->\n")[2].partition("<!-- end -->")[0]
    assert shown.strip() == compare_energies.table(found)
    assert list(found) == list(FORMULAS)


@pytest.mark.full
def test_kernels(energies):
    """A kernel that takes an energy, or declines it, unlike the table says."""
    found = json.loads(compare_energies.FILE.read_text())
    with exact():
        for name, energy in energies.items():
            kernels = compare_energies.kernels_of(energy)
            assert [x for x in kernels if x not in ("flash", "fa4")] == found[name]["kernels"], name


def test_an_error_is_seen():
    """A comparison that would pass whatever is compared."""
    right = {"out": np.linspace(1, 2, 5), "energy": np.zeros(2)}
    for factor, verdict in ((1 + 1e-8, "wrong"), (1 + 1e-12, "yes")):
        pair = {name: factor * x for name, x in right.items()}, right
        assert compare_energies.judged(lambda pair=pair: pair) == verdict


@pytest.mark.full
@pytest.mark.parametrize("name", list(FORMULAS))
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")
def test_flex_attention(name, energies, request):
    """Another function than PyTorch's of the same score and mask; by its gradients, too."""
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    # on CPU `flex_attention` refuses to differentiate; this is what it runs when it is not compiled
    from torch._higher_order_ops.flex_attention import math_attention

    formula = FORMULAS[name]
    with exact():
        x, ours, _ = compare_energies.both(energies[name], formula)

        def number(x):
            out = ours(x)[0]
            return jnp.sin(out).sum(), out

        (found, out), slopes = jax.jit(jax.value_and_grad(number, has_aux=True))(x)

    for constants in TABLES:
        constants.use(torch.from_numpy)
        request.addfinalizer(lambda constants=constants: constants.use(None))
    leaves, tree = jax.tree.flatten(x)
    tensors = [torch.tensor(np.asarray(a)).requires_grad_() for a in leaves]
    given = jax.tree.unflatten(tree, tensors)
    rows = [given[part].transpose(1, 2) for part in compare_energies.ROWS]
    parameters = jax.tree.leaves(given["energy"])
    *parameters, sink = parameters if formula.sink else (*parameters, None)

    def score(s, b, h, i, j):
        return formula.score(torch, s, b, h, i, j, parameters)

    def seen(b, h, i, j):
        return formula.seen(b, i, j) if formula.seen else i == i

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
