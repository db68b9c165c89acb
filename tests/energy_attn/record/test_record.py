"""What is recorded inside a model, whatever it is made of, is what the dense weights of each layer say."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from tests.support.meshes import mesh_of

T, N, H, LAYERS = 6, 2, 4, 3
WIDTH = N * H


class Layer(eqx.Module):
    """A residual layer of attention."""

    weights: jax.Array
    energy: ea.FreeEnergy

    def __init__(self, key, **options):
        self.weights = 0.5 * jax.random.normal(key, (3, WIDTH, N, H), jnp.float64)
        self.energy = ea.FreeEnergy(**options)

    def __call__(self, x):
        query, key, value = jnp.einsum("td,pdnh->ptnh", x, self.weights)
        return x + self.energy.attention(query, key, value).reshape(x.shape)


def dense(weights, x):
    """A layer, and its energies, entropies and heat capacities, with a matrix of weights."""
    query, key, value = jnp.einsum("td,pdnh->ptnh", x, weights)
    scores = jnp.einsum("tnh,snh->tns", query, key) / H**0.5
    energy = jax.nn.logsumexp(scores, -1)
    p = jnp.exp(scores - energy[..., None])
    mean = (p * scores).sum(-1)
    heat = (p * (scores - mean[..., None]) ** 2).sum(-1)
    entropy = -(p * jnp.log(p)).sum(-1)
    out = jnp.einsum("tns,snh->tnh", p, value)
    return x + out.reshape(x.shape), {"energy": energy, "entropy": entropy, "heat_capacity": heat}


def dense_model(weights, x):
    """All layers; values `[LAYERS, ...]`."""
    seen = []
    for each in weights:
        x, found = dense(each, x)
        seen.append(found)
    return x, jax.tree.map(lambda *x: jnp.stack(x), *seen)


def layers(**options):
    return [Layer(key, **options) for key in jax.random.split(jax.random.key(0), LAYERS)]


def stacked():
    return eqx.filter_vmap(Layer)(jax.random.split(jax.random.key(0), LAYERS))


X = jax.random.normal(jax.random.key(1), (T, WIDTH), jnp.float64)


class Chain(eqx.Module):
    """Layers one after the other, each within a transformation."""

    layers: list
    around: object = eqx.field(static=True, default=lambda f: f)

    def __call__(self, x):
        for layer in self.layers:
            x = self.around(layer)(x)
        return x


class Scan(eqx.Module):
    """Stacked layers in a loop, the body within a transformation."""

    layers: Layer
    around: object = eqx.field(static=True, default=lambda f: f)

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)

        def step(x, arrays):
            return self.around(lambda arrays, x: eqx.combine(arrays, static)(x))(arrays, x), None

        return jax.lax.scan(step, x, arrays)[0]


def own_rule(layer):
    """With a derivative of its own, which is that of the layer."""
    arrays, static = eqx.partition(layer, eqx.is_array)

    def plain(arrays, x):
        return eqx.combine(arrays, static)(x)

    run = jax.custom_vjp(plain)
    run.defvjp(lambda *args: jax.vjp(plain, *args), lambda pullback, change: pullback(change))
    return functools.partial(run, arrays)


def with_jvp(function):
    """With a tangent of its own, which is that of the function."""
    run = jax.custom_jvp(function)
    run.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
    return run


MODELS = {
    "plain": lambda: Chain(layers()),
    "jit": lambda: Chain(layers(), eqx.filter_jit),
    "checkpoint": lambda: Chain(layers(), eqx.filter_checkpoint),
    "checkpoint, policy": lambda: Chain(
        layers(),
        functools.partial(
            eqx.filter_checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        ),
    ),
    "scan": lambda: Scan(stacked()),
    "scan of checkpoint": lambda: Scan(stacked(), jax.checkpoint),
    "scan of jit": lambda: Scan(stacked(), jax.jit),
    "scan of custom_jvp": lambda: Scan(stacked(), with_jvp),
    "custom_vjp": lambda: Chain(layers(), own_rule),
}


def close(actual, exact, tolerance=1e-11):
    actual, exact = np.asarray(actual), np.asarray(exact)
    assert actual.dtype == exact.dtype and actual.shape == exact.shape
    np.testing.assert_allclose(actual, exact, rtol=tolerance, atol=tolerance)


def weights_of(model):
    """The weights `[LAYERS, ...]` of either kind of model."""
    if isinstance(model.layers, list):
        return jnp.stack([x.weights for x in model.layers])
    return model.layers.weights


def by_layers(seen):
    """Values `[LAYERS, ...]` of either kind of model."""
    if len(seen) == 1:
        return next(iter(seen.values()))
    return jax.tree.map(lambda *x: jnp.stack(x), *seen.values())


def score(found):
    """A number in which every value counts differently."""
    return sum((jnp.sin(x + i) * (1 + x)).sum() for i, x in enumerate(jax.tree.leaves(found)))


@pytest.mark.parametrize("name", MODELS)
def test_values_names_and_gradients(name):
    """A value of another layer, one that a transformation loses or repeats, a name that is none, a penalty whose
    gradient is silently zero, or a changed output."""
    model = MODELS[name]()
    quantities = "energy", "entropy", "heat_capacity"
    out, seen = ea.record(model, *quantities)(X)
    exact_out, exact = dense_model(weights_of(model), X)
    close(out, exact_out)
    jax.tree.map(close, by_layers(seen), exact)
    one = isinstance(model.layers, Layer)
    names = ["layers.energy"] if one else [f"layers[{i}].energy" for i in range(LAYERS)]
    assert list(seen) == names

    def penalty(model):
        out, seen = ea.record(model, *quantities)(X)
        return score((out, by_layers(seen)))

    gradient = weights_of(eqx.filter_jit(eqx.filter_grad(penalty))(model))
    close(gradient, jax.grad(lambda w: score(dense_model(w, X)))(weights_of(model)), 1e-9)


@pytest.mark.parametrize("name", ["plain", "scan of checkpoint"])
def test_forward_mode(name):
    """Tangents that stop where values leave a loop."""
    model = MODELS[name]()

    def run(x):
        return by_layers(ea.record(model, "energy", "entropy", "heat_capacity")(x)[1])

    def reference(x):
        return dense_model(weights_of(model), x)[1]

    close_all = functools.partial(jax.tree.map, functools.partial(close, tolerance=1e-9))
    close_all(*(jax.jvp(f, (X,), (jnp.cos(X),))[1] for f in (run, reference)))


# --- axes


def test_vmap_within_and_around():
    """An axis that ends up behind the rows, or a batch of which one is seen."""
    model = Scan(stacked())
    batch = jnp.stack([X, jnp.cos(X)])
    exact = jnp.stack([dense_model(model.layers.weights, x)[1]["energy"] for x in batch])
    _, around = jax.vmap(ea.record(model, "energy"))(batch)
    close(around["layers.energy"]["energy"], exact)
    _, within = ea.record(eqx.filter_vmap(model), "energy")(batch)  # the steps are outside
    close(within["layers.energy"]["energy"], jnp.moveaxis(exact, 0, 1))
    # a part that is not mapped has the axis, too
    one = layers()[0]

    def keys_only(x, memory):
        query, key, value = jnp.einsum("td,pdnh->ptnh", x, one.weights)
        return one.energy.attention(query, key + memory, value)

    memories = jax.random.normal(jax.random.key(5), (3, T, N, H), jnp.float64)
    run = jax.vmap(keys_only, (None, 0))
    _, seen = ea.record(run, "energy", query=lambda F: F.parts[0].query)(X, memories)
    assert seen["FreeEnergy"]["energy"].shape == seen["FreeEnergy"]["query"].shape[:3] == (3, T, N)


def test_reversed_scan_keeps_its_order():
    """Steps in the order of time instead of that of the layers."""
    model = stacked()

    def run(x):
        arrays, static = eqx.partition(model, eqx.is_array)

        def step(x, arrays):
            return eqx.combine(arrays, static)(x), None

        return jax.lax.scan(step, x, arrays, reverse=True, unroll=2)[0]

    out, seen = ea.record(run, "energy")(X)
    exact_out, exact = dense_model(model.weights[::-1], X)
    close(out, exact_out)
    close(seen["FreeEnergy"]["energy"], exact["energy"][::-1])


def test_nested_loops():
    """Axes of loops in loops in the wrong order; two calls in one step that become one."""
    first, second = layers()[:2]

    def run(x):
        def inner(x, factor):
            return second(first(x * factor)), None

        def outer(x, factors):
            return jax.lax.scan(inner, x, factors)[0], None

        return jax.lax.scan(outer, x, jnp.arange(1.0, 7.0).reshape(2, 3) / 6)[0]

    _, seen = ea.record(run, "energy")(X)
    assert list(seen) == ["FreeEnergy", "FreeEnergy#2"]
    x, exact = X, []
    for factor in jnp.arange(1.0, 7.0) / 6:
        x, a = dense(first.weights, x * factor)
        x, b = dense(second.weights, x)
        exact.append((a["energy"], b["energy"]))
    for found, wanted in zip(seen.values(), zip(*exact, strict=True), strict=True):
        close(found["energy"], jnp.stack(wanted).reshape(2, 3, T, N))


def test_branches():
    """The value of a branch that was not taken, as if it had run; or a number that hides that it did not."""
    first, second, _ = layers()
    model = eqx.Partial(
        lambda both, which, x: jax.lax.switch(
            which, [lambda x: both[0](x), lambda x: both[1](x), lambda x: x], x
        ),
        [first, second],
    )
    run = eqx.filter_jit(ea.record(model, "energy"))
    for which in range(3):
        out, seen = run(jnp.asarray(which), X)
        names = ["args[0][0].energy", "args[0][1].energy"]
        assert list(seen) == names
        close(out, (first, second, lambda x: x)[which](X))
        for i, name in enumerate(names):
            if i == which:
                close(seen[name]["energy"], dense((first, second)[i].weights, X)[1]["energy"])
            else:
                assert bool(jnp.isnan(seen[name]["energy"]).all())
    with pytest.raises(NotImplementedError, match="NaN says that it did not run; got int"):
        ea.record(model, number=lambda F: jnp.ones(3, jnp.int32))(jnp.asarray(1), X)


def test_unknown_lengths_are_refused():
    """Values of the last step as if they were those of all, or none."""
    layer = layers()[0]

    def run(x):
        return jax.lax.while_loop(lambda x: x.sum() < 5, lambda x: layer(x), x)

    with pytest.raises(NotImplementedError, match=r"record: .* got 'FreeEnergy' inside 'while'"):
        ea.record(run)(X)
    known = ea.record(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: layer(x), x), "energy")(X)[1]
    assert known["FreeEnergy"]["energy"].shape == (2, T, N)


# --- meshes


@pytest.mark.parametrize("kind", ["8", "2x4 explicit"])
def test_sharded_keys(kind):
    """Values of one shard instead of all keys, or a mesh that recording leaves."""
    mesh = mesh_of(kind)
    parallel = SequenceParallel(tuple(mesh.axis_names))
    x = jnp.concatenate([X, X[:2]])
    plain = Scan(stacked())
    sharded = eqx.tree_at(
        lambda m: m.layers.energy,
        plain,
        ea.FreeEnergy(parallel=parallel),
        is_leaf=lambda x: isinstance(x, ea.FreeEnergy),
    )

    def run(model):
        def penalty(model):
            out, seen = ea.record(model, "energy", "entropy")(x)
            return score((out, seen)), seen

        (_, seen), gradient = eqx.filter_value_and_grad(penalty, has_aux=True)(model)
        return seen, gradient.layers.weights

    exact = eqx.filter_jit(run)(plain)
    with jax.set_mesh(mesh):
        found = eqx.filter_jit(run)(sharded)
    jax.tree.map(functools.partial(close, tolerance=1e-9), found, exact)


def test_inside_shard_map():
    """One device's values as those of all, or an axis that is named by no device."""
    mesh = mesh_of("2x4")
    layer = layers()[0]
    batch = jnp.stack([X * i for i in range(1, 5)])

    def local(batch):  # four examples over one of the axes
        return jax.lax.map(layer, batch)

    spec = P("device")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    out, seen = ea.record(run, "energy")(batch)
    exact_out, exact = jax.vmap(functools.partial(dense, layer.weights))(batch)
    close(out, exact_out)
    found = seen["FreeEnergy"]["energy"]  # [devices, examples of each, T, N]
    assert found.shape == (8, 1, T, N)
    close(found[:4, 0], exact["energy"])
    close(found[4:, 0], exact["energy"])


# --- what is recorded, and when


def test_nothing_changes_where_nothing_is_recorded():
    """A tag that stays in programs, or in JAX's cache of one: traced first without, then with, then without."""
    model = Chain(layers(), eqx.filter_jit)
    program = str(jax.make_jaxpr(model)(X))
    first = layers()[0]
    compiled = jax.jit(lambda x: first(x))
    before = str(jax.make_jaxpr(compiled)(X))
    compiled(X)
    for _ in range(2):
        assert list(ea.record(compiled, "energy")(X)[1]) == ["FreeEnergy"]
        assert str(jax.make_jaxpr(compiled)(X)) == before
    assert list(ea.record(compiled, "entropy")(X)[1]["FreeEnergy"]) == ["entropy"]
    ea.record(model)(X)
    assert str(jax.make_jaxpr(model)(X)) == program
    assert "record" not in program
    # and no tag is left in one that is recorded
    assert "level=" not in str(jax.make_jaxpr(lambda x: ea.record(model)(x))(X))


def test_energies_take_no_pass():
    """A second pass over the keys for energies that attention has computed, or for values that nobody uses."""
    q, k, v = jax.random.normal(jax.random.key(6), (3, 1, 256, N, H))
    energy = ea.FreeEnergy(implementation="blockwise")

    def loops(function):
        return jax.jit(function).lower(q).compile().as_text().count(" while(")

    for attend in (energy.attention, ea.attention):
        options = {} if attend is not ea.attention else {"implementation": "blockwise"}

        def run(q, attend=attend, options=options):
            return attend(q, k, v, **options)

        def energies(q, run=run):
            out, seen = ea.record(run, "energy")(q)
            return out, list(seen.values())

        assert loops(run) == loops(energies) == 1
        assert loops(lambda q, run=run: ea.record(run)(q)[0]) == 1


def test_gradients_within():
    """The backward pass recorded as if it were another call, or the forward one not at all."""
    for name in ("plain", "jit", "scan", "checkpoint", "scan of checkpoint"):
        model = MODELS[name]()

        def step(x, model=model):
            return jax.value_and_grad(lambda x: model(x).sum())(x)

        # also where nobody uses the value, of which JAX drops what it can
        _, alone = ea.record(jax.grad(lambda x, model=model: model(x).sum()), "energy")(X)
        close(by_layers(alone)["energy"], dense_model(weights_of(model), X)[1]["energy"])
        (value, gradient), seen = ea.record(step, "energy", "entropy", "heat_capacity")(X)
        exact = step(X)
        close(value, exact[0])
        close(gradient, exact[1])
        jax.tree.map(close, by_layers(seen), dense_model(weights_of(model), X)[1])


def test_every_way_to_ask():
    """A way of calling that is not seen, or at another source, bias, mask or position than its own."""
    q, k, v, z = jax.random.normal(jax.random.key(3), (4, T, N, H), jnp.float64)
    bias = jax.random.normal(jax.random.key(4), (1, N, T, T), jnp.float64)
    positions = jnp.arange(T)[::-1]
    energy = ea.FreeEnergy(scale=0.7, mask=ea.masks.Window(3, 3), name="mine")

    def run(q):
        rows = {"query_positions": positions, "key_positions": positions}
        F = energy.at(q, k, v, bias=bias, **rows)
        energy(q, k, v, source=z, mask=ea.masks.Causal(), **rows)
        energy.attention(q, k, v)
        ea.attention(q, k, v, bias, scale=0.3)
        ea.free_energy(q, k, v, source=z)
        return F.attention()

    out, seen = ea.record(run, "energy", "entropy")(q)
    rows = {"query_positions": positions, "key_positions": positions}
    causal = ea.FreeEnergy(scale=0.7, mask=ea.masks.Window(3, 3) & ea.masks.Causal())
    exact = {
        "mine": energy.at(q, k, v, bias=bias, **rows),
        "mine#2": causal.at(q, k, v, **rows).tilt(z),
        "mine#3": energy.at(q, k, v),
        "attention": ea.FreeEnergy(scale=0.3).at(q, k, v, bias=bias),
        "free_energy": ea.FreeEnergy().at(q, k, v).tilt(z),
    }
    assert list(seen) == list(exact)
    close(out, exact["mine"].attention())
    for name, F in exact.items():
        close(seen[name]["energy"], F())
        close(seen[name]["entropy"], F.entropy())


def test_quantities():
    """A figure under the name of another, or computed from a part of the rows that are hidden."""
    layer = Layer(jax.random.key(0), mask=ea.masks.Function(lambda query, key: query + key < 8))
    query, key, value = jnp.einsum("td,pdnh->ptnh", X, layer.weights)
    F = layer.energy.at(query, key, value)
    report = ea.energy_report(F, per_query=True)
    _, seen = ea.record(layer)(X)
    names = ("energy", "entropy", "heat_capacity", "variance", "effective_keys")
    assert set(seen["energy"]) == set(names)
    for name in names:
        close(seen["energy"][name], getattr(report, name)[0])
        alone = ea.record(layer, name)(X)[1]["energy"]
        assert list(alone) == [name]
        close(alone[name], getattr(report, name)[0])
    _, seen = ea.record(layer, "attention", "score_moments", top=lambda F: F.covariance())(X)
    close(seen["energy"]["attention"], F.attention())
    close(seen["energy"]["score_moments"].mean, F.score_moments().mean)
    close(seen["energy"]["top"], F.covariance())


def test_scores_and_sinks():
    """The measure of an energy without its score or its sink."""
    sink = jnp.asarray([0.3, -0.4])
    layer = Layer(jax.random.key(0), score=ea.scores.SoftCap(0.5), sink=sink)
    query, key, value = jnp.einsum("td,pdnh->ptnh", X, layer.weights)
    _, seen = ea.record(layer, "energy", "entropy", "score_max")(X)
    F = layer.energy.at(query, key, value)
    for name, wanted in {"energy": F(), "entropy": F.entropy(), "score_max": F.score_max()}.items():
        close(seen["energy"][name], wanted)
    scores = 0.5 * jnp.tanh(jnp.einsum("tnh,snh->tns", query, key) / H**0.5 / 0.5)
    terms = jnp.concatenate([scores, jnp.broadcast_to(sink[None, :, None], (T, N, 1))], -1)
    close(seen["energy"]["energy"], jax.nn.logsumexp(terms, -1))


def test_dropout_is_not_recorded():
    """The kept keys of a call with dropout as another energy, or instead of it."""
    layer = ea.MultiheadAttention(N, WIDTH, dropout_p=0.5, dtype=jnp.float64, key=jax.random.key(0))
    (out, energy), seen = ea.record(layer, "energy")(
        X, X, X, key=jax.random.key(1), return_energy=True
    )
    assert list(seen) == ["energy"]
    close(seen["energy"]["energy"], energy)
    close(out, layer(X, X, X, key=jax.random.key(1)))


def test_names():
    """A tied module's second call that replaces the first, or a name that is not where the module is."""
    layer = layers()[0]

    class Tied(eqx.Module):
        inner: dict

        def __call__(self, x):
            return self.inner["a"](self.inner["a"](x))

        def method(self, x, *, also):
            return also(self.inner["a"](x))

    model = Tied({"a": layer})
    _, seen = ea.record(model, "energy")(X)
    assert list(seen) == ["inner['a'].energy", "inner['a'].energy#2"]
    middle, exact = dense(layer.weights, X)
    close(seen["inner['a'].energy"]["energy"], exact["energy"])
    close(seen["inner['a'].energy#2"]["energy"], dense(layer.weights, middle)[1]["energy"])
    _, seen = ea.record(model.method, "energy")(X, also=layer)
    assert list(seen) == ["inner['a'].energy", "FreeEnergy"]
    _, seen = jax.jit(jax.vmap(ea.record(eqx.filter_vmap(model), "energy")))(X[None, None])
    assert list(seen) == ["inner['a'].energy", "inner['a'].energy#2"]
    _, seen = ea.record(ea.FreeEnergy(), "energy")(*jnp.ones((3, T, N, H)))
    assert list(seen) == ["FreeEnergy"]
    many = Chain([layer] * 11)
    found = jax.jit(lambda x: ea.record(many, "energy")(x)[1])(X)
    assert list(found) == [f"layers[{i}].energy" for i in range(11)]  # not in alphabetical order


def test_records_within_records():
    """An inner recording that hides its calls from the outer one, or that sees the outer one's."""
    first, second, _ = layers()

    def inner(x):
        out, seen = ea.record(first, "entropy")(x)
        return second(out), seen

    (out, found), seen = ea.record(eqx.filter_jit(inner), "energy")(X)
    exact_out, exact = dense_model(jnp.stack([first.weights, second.weights]), X)
    close(out, exact_out)
    assert len(found) == 1 and len(seen) == 2
    close(next(iter(found.values()))["entropy"], exact["entropy"][0])
    close(by_layers(seen)["energy"], exact["energy"])
    _, seen = ea.record(with_jvp(lambda x: inner(x)[0]), "energy")(X)
    assert len(seen) == 2
    within = with_jvp(lambda x: second(first(x)))
    _, seen = ea.record(lambda x: ea.record(within, "entropy")(x)[0], "energy")(X)
    assert len(seen) == 2


def test_bad_input(unchecked):
    """An empty recording of a model that attends by other means; a name that is taken for a figure."""
    with pytest.raises(
        ValueError, match="function: wanted one that calls a FreeEnergy, got .*Linear"
    ):
        ea.record(eqx.nn.Linear(2, 2, key=jax.random.key(0)))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"function: wanted a function or a module, got int 3"):
        ea.record(3)
    layer = layers()[0]
    with pytest.raises(
        ValueError, match=r"wanted energy, .*entropy, .*covariance, .*; got 'entropie'"
    ):
        ea.record(layer, "entropie")
    with pytest.raises(ValueError, match=r"needs no arguments, got 'sample'; .*sample=lambda F"):
        ea.record(layer, "sample")
    with pytest.raises(ValueError, match="got '_part'|got '__call__'"):
        ea.record(layer, "__call__")
    with pytest.raises(ValueError, match="each once, got 'energy' twice"):
        ea.record(layer, "energy", "energy")
    with pytest.raises(
        TypeError, match="quantities: wanted names; functions of a Gibbs are keywords"
    ):
        ea.record(layer, lambda F: F())
    with pytest.raises(TypeError, match="mine: wanted a function of a Gibbs, got str"):
        ea.record(layer, mine="energy")
    with pytest.raises(TypeError, match="name: wanted a text or None, got int 3"):
        ea.FreeEnergy(name=3)
