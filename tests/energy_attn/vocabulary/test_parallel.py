"""Losses over a vocabulary on a mesh: the answers of one device, and what devices send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import collectives
from tests.energy_attn.vocabulary.problems import answers, arrays, dense, loss_of, static
from tests.support.compare import close
from tests.support.meshes import mesh_of
from tests.support.programs import word_blocks
from tests.support.selection import few

V = ea.VocabularyParallel
# names of `parallel=`, and the specs of hidden states and of words
KINDS = {
    "words": (V(("node", "device")), P(), P(("node", "device"))),
    "tokens": (V(tokens="node"), P("node"), P()),
    "both": (V("device", "node"), P("node"), P("device")),
    "parts": (V(("node", "device"), "node"), P("node"), P(("node", "device"))),
}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    word_blocks(monkeypatch, 1, 16)


def given(kind="everything"):
    # 304 words, a multiple of 8, of which the last four are hidden
    made = {name: jnp.asarray(x) for name, x in arrays(kind).items()}
    return made


def put(mesh, made, tokens, words):
    specs = {"hidden": tokens, "other_hidden": tokens}
    return {
        name: jax.device_put(x, jax.NamedSharding(mesh, specs.get(name, words)))
        for name, x in made.items()
    }


@pytest.mark.parametrize("explicit", ["", " explicit"])
@pytest.mark.parametrize("kind", few(KINDS, "both", "parts"))
def test_on_a_mesh(kind, explicit, monkeypatch):
    """A word counted by every device, a mean of one device's words, or a gradient that is not summed over tokens."""
    monkeypatch.setattr("tests.energy_attn.vocabulary.problems.WORDS", 304)
    parallel, tokens, words = KINDS[kind]
    top = kind != "parts"
    mesh, alone = mesh_of("2x4" + explicit), jax.device_get(answers("everything", given(), top=top))
    exact = jax.device_get(jax.grad(loss_of(dense, "everything", top=top))(given()))
    with jax.set_mesh(mesh):
        made = put(mesh, given(), tokens, words)
        options = {"parallel": None if explicit else parallel, "top": top}
        found = jax.device_get(jax.jit(functools.partial(answers, "everything", **options))(made))
        loss = loss_of(answers, "everything", **options)
        slope = jax.jit(jax.grad(loss))(made)
        rate = jax.jit(lambda x: jax.jvp(loss, (x,), (x,))[1])(made)
    close(found[0], alone[0])
    for x, y in zip(found[1], alone[1], strict=True):
        np.testing.assert_array_equal(x, y)
    close(jax.device_get(slope), exact, tolerance=1e-10)
    along = sum(np.vdot(exact[name], x) for name, x in given().items())
    close(jax.device_get(rate), along, tolerance=1e-10)


def test_inside_shard_map(monkeypatch):
    """Labels counted from the first word of each device, or cotangents that devices do not sum."""
    monkeypatch.setattr("tests.energy_attn.vocabulary.problems.WORDS", 304)
    labels = jnp.asarray(static("plain")[2])
    made, parallel = given("plain"), V("device", "node")

    def loss(hidden, weight, labels, parallel=None):
        p = ea.Categorical(hidden, weight, parallel=parallel)
        return p.log_prob(labels) * jnp.sin(p.entropy())

    args = made["hidden"], made["weight"]
    wanted = jax.value_and_grad(lambda *x: loss(*x, labels).sum(), (0, 1))(*args)
    with jax.set_mesh(mesh_of("2x4")):
        mapped = jax.shard_map(
            functools.partial(loss, parallel=parallel),
            in_specs=(P("node"), P("device"), P("node")),
            out_specs=P("node"),
        )
        found = jax.jit(jax.value_and_grad(lambda *x: mapped(*x, labels).sum(), (0, 1)))(*args)
    close(jax.device_get(found), jax.device_get(wanted), tolerance=1e-10)


@pytest.mark.parametrize(
    ("words", "tokens", "error"),
    [
        ("nowhere", (), "parallel: wanted axes of the mesh in force"),
        (
            ("node", "device"),
            (),
            "weight: wanted a number of words that is a multiple of the 8 devices",
        ),
        ((), "device", "hidden: wanted a number of tokens that is a multiple of the 4 devices"),
        ((), P("node", None, "device"), "parallel: wanted tokens with axes of the 2 leading axes"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_meshes(words, tokens, error):
    """Another message than one that names the argument."""
    with jax.set_mesh(mesh_of("2x4")), pytest.raises(ValueError, match=error):
        ea.Categorical(jnp.ones((2, 3, 6)), jnp.ones((300, 6)), parallel=V(words, tokens))
    both = ea.VocabularyParallel("node", "node")
    with jax.set_mesh(mesh_of("2x4")):
        p = ea.Categorical(jnp.ones((2, 3, 6)), jnp.ones((300, 6)), parallel=both)
        with pytest.raises(ValueError, match="parallel: wanted words and tokens over different"):
            p.top_k(2)
    with pytest.raises(ValueError, match="tokens: wanted each mesh axis once"):
        V("device", P("node", "node"))


def test_what_is_sent():
    """Logits, hidden states or rows of the output matrix that are sent forward; another sum of gradients."""
    tokens, count, width = 64, 512, 32
    hidden, weight = (jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (tokens, count))
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def sent(f, parallel):
        with jax.set_mesh(mesh_of("2x4")):
            program = jax.jit(functools.partial(f, parallel=parallel)).lower(hidden, weight, labels)
            return sorted(
                (x.kind, x.bytes * (x.count or 1)) for x in collectives(program.compile())
            )

    loss = functools.partial(ea.softmax_cross_entropy, reduction="sum")
    slope = jax.grad(loss, (0, 1))
    few_numbers = 4 * tokens // 2
    forward = dict(sent(loss, V("device", "node")))
    assert set(forward) == {"all-reduce"}
    kinds = sent(loss, V("device", "node"))
    assert sum(size for _, size in kinds) <= 3 * few_numbers + 8
    backward = sent(slope, V("device", "node"))
    gradients = 4 * width * (tokens // 2 + count // 4)  # of a device's tokens, and of its words
    assert sum(size for _, size in backward) <= gradients + 4 * few_numbers
    # in parts: rows of the matrix are gathered forward and backward, and their gradients scattered
    parts = {}
    for kind, size in sent(slope, V(("node", "device"), "node")):
        parts[kind] = parts.get(kind, 0) + size
    assert parts["all-gather"] <= 2 * 4 * (width + 1) * count // 4
