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
from energy_attn.models import Llama
from tests.support.compare import close
from tests.support.complaints import refused
from tests.support.llama import CONFIG
from tests.support.meshes import mesh_of
from tests.support.selection import few

T, N, H, LAYERS = 8, 2, 4, 2
WIDTH = N * H
WEIGHTS = 0.5 * np.random.default_rng(0).standard_normal((LAYERS, 3, WIDTH, N, H))
X = np.random.default_rng(1).standard_normal((T, WIDTH))
QUANTITIES = ("energy", "entropy", "heat_capacity")


class Layer(eqx.Module):
    """A residual layer of attention."""

    weights: jax.Array
    energy: ea.FreeEnergy

    def __init__(self, weights, **options):
        self.weights = jnp.asarray(weights)
        self.energy = ea.FreeEnergy(**options)

    def heads(self, x):
        return jnp.einsum("td,pdnh->ptnh", x, self.weights)

    def __call__(self, x):
        return x + self.energy.attention(*self.heads(x)).reshape(x.shape)


def dense(weights, x, seen=True, np=np):
    """A layer, and its figures, with a matrix of weights; `np` is NumPy, or JAX's for derivatives."""
    query, key, value = np.einsum("td,pdnh->ptnh", x, weights)
    scores = np.einsum("tnh,snh->tns", query, key) / H**0.5
    terms = np.where(seen, np.exp(scores), 0.0)
    energy = np.log(terms.sum(-1))
    p = terms / terms.sum(-1, keepdims=True)
    mean = (p * scores).sum(-1)
    heat = (p * (scores - mean[..., None]) ** 2).sum(-1)
    out = np.einsum("tns,snh->tnh", p, value)
    apart = ((value[None] - out[:, None]) ** 2).sum(-1)  # [T, S, N]
    variance = (p * apart.swapaxes(1, 2)).sum(-1)
    figures = {"energy": energy, "entropy": energy - mean, "heat_capacity": heat}
    figures |= {"variance": variance, "effective_keys": np.exp(figures["entropy"])}
    return x + out.reshape(x.shape), figures | {"attention": out, "mean": mean}


def dense_model(weights, x, np=np):
    """All layers; values `[LAYERS, ...]`."""
    seen = []
    for each in weights:
        x, found = dense(each, x, np=np)
        seen.append(found)
    return x, {name: np.stack([found[name] for found in seen]) for name in QUANTITIES}


@functools.cache
def exact():
    """Of all layers: what they return and say, its `score`'s gradient in the weights, the tangents along cos X, and
    the sum of the output and its gradient in X: all by differentiating dense matrices."""

    @jax.jit
    def run(weights, x):
        def total(weights):
            found = dense_model(weights, x, np=jnp)
            return score(found), found

        gradient, found = jax.grad(total, has_aux=True)(weights)
        along = jax.jvp(lambda x: dense_model(weights, x, np=jnp)[1], (x,), (jnp.cos(x),))[1]
        within = jax.value_and_grad(lambda x: dense_model(weights, x, np=jnp)[0].sum())(x)
        return found, gradient, along, within

    return jax.device_get(run(WEIGHTS, X))


def layers():
    return [Layer(x) for x in WEIGHTS]


def stacked(**options):
    return Layer(WEIGHTS, **options)


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


def by_layers(seen):
    """Values `[LAYERS, ...]` of either kind of model."""
    if len(seen) == 1:
        return next(iter(seen.values()))
    return jax.tree.map(lambda *x: jnp.stack(x), *seen.values())


def said(model, x):
    return by_layers(ea.record(model, *QUANTITIES)(x)[1])


def score(found):
    """A number in which every value counts differently."""
    return sum((jnp.sin(x + i) * (1 + x)).sum() for i, x in enumerate(jax.tree.leaves(found)))


@eqx.filter_jit
def with_gradient(model):
    """What a model returns and says, and the gradient of its score in the weights."""

    def penalty(model):
        out, seen = ea.record(model, *QUANTITIES)(X)
        return score((out, by_layers(seen))), (out, seen)

    gradient, found = eqx.filter_grad(penalty, has_aux=True)(model)
    if isinstance(model.layers, Layer):
        return found, gradient.layers.weights
    return found, jnp.stack([x.weights for x in gradient.layers])


# What runs in several of these is met in those that are kept.
@pytest.mark.parametrize("name", few(list(MODELS), "scan of checkpoint", "custom_vjp"))
def test_values_names_and_gradients(name):
    """A value of another layer, one that a transformation loses or repeats, a name that is none, a penalty whose
    gradient is silently zero, or a changed output."""
    model = MODELS[name]()
    (out, seen), gradient = with_gradient(model)
    found, wanted, *_ = exact()
    close((out, by_layers(seen)), found)
    if name in ("plain", "scan of checkpoint"):  # tangents that stop where values leave a loop
        run = jax.jit(lambda x: jax.jvp(lambda x: said(model, x), (x,), (jnp.cos(x),))[1])
        close(run(X), exact()[2], tolerance=1e-9)
    one = isinstance(model.layers, Layer)
    names = ["layers.energy"] if one else [f"layers[{i}].energy" for i in range(LAYERS)]
    assert list(seen) == names
    close(gradient, wanted, tolerance=1e-9)


# --- axes


def test_vmap_within_and_around():
    """An axis that ends up behind the rows, or a batch of which one is seen."""
    model = Scan(stacked())
    batch = np.stack([X, np.cos(X)])
    wanted = np.stack([dense_model(WEIGHTS, x)[1]["energy"] for x in batch])

    @jax.jit
    def run(batch):
        _, around = jax.vmap(ea.record(model, "energy"))(batch)
        _, within = ea.record(eqx.filter_vmap(model), "energy")(batch)
        return around, within

    around, within = run(batch)
    close(around["layers.energy"]["energy"], wanted)
    close(within["layers.energy"]["energy"], wanted.swapaxes(0, 1))  # the steps are outside
    # a part that is not mapped has the axis, too
    one = layers()[0]

    def keys_only(x, memory):
        query, key, value = one.heads(x)
        return one.energy.attention(query, key + memory, value)

    mapped = ea.record(jax.vmap(keys_only, (None, 0)), "energy", key=lambda F: F.parts[0].key)
    seen = eqx.filter_eval_shape(mapped, X, np.zeros((3, T, N, H)))[1]["FreeEnergy"]
    assert seen["energy"].shape == seen["key"].shape[:3] == (3, T, N)


@pytest.mark.smoke
def test_reversed_scan_keeps_its_order():
    """Steps in the order of time instead of that of the layers; eagerly, not compiled."""
    model = stacked()

    def run(x):
        arrays, static = eqx.partition(model, eqx.is_array)

        def step(x, arrays):
            return eqx.combine(arrays, static)(x), None

        return jax.lax.scan(step, x, arrays, reverse=True, unroll=2)[0]

    out, seen = ea.record(run, "energy")(X)
    exact_out, figures = dense_model(WEIGHTS[::-1], X)
    close(out, exact_out)
    close(seen["FreeEnergy"]["energy"], figures["energy"][::-1])


def test_nested_loops():
    """Axes of loops in loops in the wrong order; two calls in one step that become one."""
    first, second = layers()
    factors = np.arange(1.0, 7.0) / 6

    def run(x):
        def inner(x, factor):
            return second(first(x * factor)), None

        def outer(x, factors):
            return jax.lax.scan(inner, x, factors)[0], None

        return jax.lax.scan(outer, x, factors.reshape(2, 3))[0]

    _, seen = ea.record(run, "energy")(X)
    assert list(seen) == ["FreeEnergy", "FreeEnergy#2"]
    x, wanted = X, []
    for factor in factors:
        x, figures = dense_model(WEIGHTS, x * factor)
        wanted.append(figures["energy"])
    for i, found in enumerate(seen.values()):
        close(found["energy"], np.stack(wanted)[:, i].reshape(2, 3, T, N))


def test_branches():
    """The value of a branch that was not taken, as if it had run; or a number that hides that it did not."""
    model = eqx.Partial(
        lambda both, which, x: jax.lax.switch(
            which, [lambda x: both[0](x), lambda x: both[1](x), lambda x: x], x
        ),
        layers(),
    )
    run = eqx.filter_jit(ea.record(model, "energy"))
    names = ["args[0][0].energy", "args[0][1].energy"]
    each = [*(dense(weights, X) for weights in WEIGHTS), (X, None)]
    for which, (wanted, figures) in enumerate(each):
        out, seen = run(jnp.asarray(which), X)
        assert list(seen) == names
        close(out, wanted)
        for i, name in enumerate(names):
            if i == which:
                close(seen[name]["energy"], figures["energy"])
            else:
                assert np.isnan(seen[name]["energy"]).all()
    with pytest.raises(NotImplementedError, match="NaN says that it did not run; got int"):
        ea.record(model, number=lambda F: jnp.ones(3, jnp.int32))(jnp.asarray(1), X)


def test_unknown_lengths_are_refused():
    """Values of the last step as if they were those of all, or none."""
    layer = layers()[0]

    def run(x):
        return jax.lax.while_loop(lambda x: x.sum() < 5, lambda x: layer(x), x)

    with pytest.raises(NotImplementedError, match=r"record: .* got 'FreeEnergy' inside 'while'"):
        ea.record(run)(X)
    known = ea.record(lambda x: jax.lax.fori_loop(0, 2, lambda _, x: layer(x), x), "energy")
    seen = eqx.filter_eval_shape(known, X)[1]
    assert seen["FreeEnergy"]["energy"].shape == (2, T, N)


# --- meshes


def sharded(mesh):
    return Scan(stacked(parallel=SequenceParallel(tuple(mesh.axis_names))))


@pytest.mark.parametrize("kind", few(["8", "2x4 explicit"], "2x4 explicit"))
def test_sharded_keys(kind):
    """Values of one shard in the place of all keys, or their gradient; a mesh that recording leaves."""
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        (out, seen), gradient = with_gradient(sharded(mesh))
    found, wanted, *_ = exact()
    close((out, seen["layers.energy"]), found)
    close(gradient, wanted, tolerance=1e-9)


def test_inside_shard_map():
    """One device's values as those of all, or an axis that is named by no device."""
    mesh = mesh_of("2x4")
    layer = layers()[0]
    batch = np.stack([X * i for i in range(1, 5)])

    def local(batch):  # four examples over one of the axes
        return jax.lax.map(layer, batch)

    spec = P("device")
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    out, seen = ea.record(run, "energy")(batch)
    each = [dense(WEIGHTS[0], x) for x in batch]
    close(out, np.stack([x for x, _ in each]))
    energies = np.stack([figures["energy"] for _, figures in each])
    # [devices, examples of each, T, N]
    close(seen["FreeEnergy"]["energy"], np.concatenate([energies, energies])[:, None])


# --- what is recorded, and when


def traced(function, *args):
    """The shapes of what is seen: what is traced, and not run."""
    return eqx.filter_eval_shape(function, *args)[1]


def test_nothing_changes_where_nothing_is_recorded():
    """A tag that stays in programs, or in JAX's cache of one: traced first without, then with, then without."""
    model = Chain(layers(), eqx.filter_jit)
    program = str(jax.make_jaxpr(model)(X))
    first = layers()[0]
    compiled = jax.jit(lambda x: first(x))
    before = str(jax.make_jaxpr(compiled)(X))
    compiled(X)
    for _ in range(2):
        assert list(traced(ea.record(compiled, "energy"), X)) == ["FreeEnergy"]
        assert str(jax.make_jaxpr(compiled)(X)) == before
    assert list(traced(ea.record(compiled, "entropy"), X)["FreeEnergy"]) == ["entropy"]
    # and no tag is left in one that is recorded
    assert "level=" not in str(jax.make_jaxpr(lambda x: ea.record(model)(x))(X))
    assert str(jax.make_jaxpr(model)(X)) == program
    assert "record" not in program


def test_energies_take_no_pass():
    """A second pass over the keys for energies that attention has computed, or for values that nobody uses."""
    q, k, v = map(jnp.asarray, np.ones((3, 1, 256, N, H)))
    attend = ea.FreeEnergy(implementation="blockwise").attention

    def loops(function):
        return jax.jit(function).lower(q).compile().as_text().count(" while(")

    def energies(function, **options):
        run = ea.record(lambda q: function(q, k, v, **options), "energy")
        return lambda q: jax.tree.leaves(run(q))

    assert loops(energies(attend)) == 1
    assert loops(energies(ea.attention, implementation="blockwise")) == 1
    assert loops(lambda q: ea.record(lambda q: attend(q, k, v))(q)[0]) == 1


@pytest.mark.parametrize(
    "name", few(["plain", "jit", "scan", "checkpoint", "scan of checkpoint"], "scan of checkpoint")
)
def test_gradients_within(name):
    """The backward pass recorded as if it were another call, or the forward one not at all."""
    model = MODELS[name]()

    def total(x):
        return model(x).sum()

    @jax.jit
    def run(x):
        # also where nobody uses the value, of which JAX drops what it can
        _, alone = ea.record(jax.grad(total), "energy")(x)
        return ea.record(jax.value_and_grad(total), "energy")(x), alone

    (found, seen), alone = run(X)
    (_, figures), _, _, wanted = exact()
    close(found, wanted)
    for each in (seen, alone):
        close(by_layers(each), {"energy": figures["energy"]})


def test_every_way_to_ask():
    """A way of calling that is not seen, or at another source, bias, mask or position than its own."""
    rng = np.random.default_rng(3)
    q, k, v, z = rng.standard_normal((4, T, N, H))
    bias = rng.standard_normal((1, N, T, T))
    positions = jnp.asarray(np.arange(T)[::-1])
    rows = {"query_positions": positions, "key_positions": positions}
    window, causal = ea.masks.Window(3, 3), ea.masks.Causal()

    def run(q, k, v, z, bias):
        energy = ea.FreeEnergy(scale=0.7, mask=window, name="mine")
        F = energy.at(q, k, v, bias=bias, **rows)
        energy(q, k, v, source=z, mask=causal, **rows)
        energy.attention(q, k, v)
        ea.attention(q, k, v, bias, scale=0.3)
        ea.free_energy(q, k, v, source=z)
        return F.attention()

    @jax.jit
    def both(q, k, v, z, bias):
        energy = ea.FreeEnergy(scale=0.7, mask=window)
        narrow = ea.FreeEnergy(scale=0.7, mask=window & causal)
        F = energy.at(q, k, v, bias=bias, **rows)
        measures = {
            "mine": F,
            "mine#2": narrow.at(q, k, v, **rows).tilt(z),
            "mine#3": energy.at(q, k, v),
            "attention": ea.FreeEnergy(scale=0.3).at(q, k, v, bias=bias),
            "free_energy": ea.FreeEnergy().at(q, k, v).tilt(z),
        }
        wanted = {name: {"energy": each()} for name, each in measures.items()}
        return ea.record(run, "energy")(q, k, v, z, bias), (F.attention(), wanted)

    (out, seen), (exact_out, wanted) = both(q, k, v, z, bias)
    assert list(seen) == ["mine", "mine#2", "mine#3", "attention", "free_energy"]
    close(out, exact_out)
    close(dict(seen), wanted)


def test_quantities():
    """A figure under the name of another, or computed from a part of the rows that are hidden."""
    layer = Layer(WEIGHTS[0], mask=ea.masks.Function(lambda query, key: query + key < 8))
    names = ("energy", "entropy", "heat_capacity", "variance", "effective_keys")
    single = ("energy", "effective_keys")  # each by other passes than all together

    @jax.jit
    def run(x):
        others = ea.record(layer, "attention", mean=lambda F: F.score_moments().mean)
        return (
            ea.record(layer)(x)[1]["energy"],
            [ea.record(layer, name)(x)[1]["energy"] for name in single],
            others(x)[1]["energy"],
        )

    together, alone, others = run(X)
    seen = (np.arange(T)[:, None, None] + np.arange(T)) < 8
    figures = dense(WEIGHTS[0], X, seen)[1]
    close(together, {name: figures[name] for name in names})
    for name, found in zip(single, alone, strict=True):
        close(found, {name: figures[name]})
    close(others, {name: figures[name] for name in ("attention", "mean")})


def test_scores_and_sinks():
    """The measure of an energy without its score or its sink."""
    sink = np.asarray([0.3, -0.4])
    layer = Layer(WEIGHTS[0], score=ea.scores.SoftCap(0.5), sink=jnp.asarray(sink))

    @jax.jit
    def run(x):
        F = layer.energy.at(*layer.heads(x))
        wanted = {"energy": F(), "entropy": F.entropy(), "score_max": F.score_max()}
        return ea.record(layer, *wanted)(x)[1]["energy"], wanted

    found, wanted = run(X)
    close(found, wanted)
    query, key, _ = np.einsum("td,pdnh->ptnh", X, WEIGHTS[0])
    scores = 0.5 * np.tanh(np.einsum("tnh,snh->tns", query, key) / H**0.5 / 0.5)
    close(found["energy"], np.log(np.exp(scores).sum(-1) + np.exp(sink)))


def test_dropout_is_not_recorded():
    """The kept keys of a call with dropout as another energy, or instead of it."""
    make = functools.partial(ea.nn.MultiheadAttention, N, WIDTH, dropout_p=0.5, dtype=jnp.float64)

    @jax.jit
    def run(x, keys):
        layer = make(key=keys[0])
        recorded = ea.record(layer, "energy")(x, x, x, key=keys[1], return_energy=True)
        return recorded, layer(x, x, x, key=keys[1])

    ((out, energy), seen), plain = run(X, jax.random.split(jax.random.key(0)))
    assert list(seen) == ["energy"]
    close(seen["energy"]["energy"], energy)
    close(out, plain)


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
    middle, figures = dense(WEIGHTS[0], X)
    close(seen["inner['a'].energy"]["energy"], figures["energy"])
    close(seen["inner['a'].energy#2"]["energy"], dense(WEIGHTS[0], middle)[1]["energy"])
    method = functools.partial(ea.record(model.method, "energy"), also=layer)
    assert list(traced(method, X)) == ["inner['a'].energy", "FreeEnergy"]
    mapped = jax.vmap(ea.record(eqx.filter_vmap(model), "energy"))
    assert list(traced(mapped, X[None, None])) == ["inner['a'].energy", "inner['a'].energy#2"]
    energy = ea.record(ea.FreeEnergy(), "energy")
    assert list(traced(energy, *np.ones((3, T, N, H)))) == ["FreeEnergy"]
    many = Chain([layer] * 11)
    found = traced(jax.jit(lambda x: ea.record(many, "energy")(x)), X)
    assert list(found) == [f"layers[{i}].energy" for i in range(11)]  # not in alphabetical order


def test_records_within_records():
    """An inner recording that hides its calls from the outer one, or that sees the outer one's."""
    first, second = layers()

    def inner(x):
        out, seen = ea.record(first, "entropy")(x)
        return second(out), seen

    (out, found), seen = ea.record(eqx.filter_jit(inner), "energy")(X)
    exact_out, figures = dense_model(WEIGHTS, X)
    close(out, exact_out)
    assert len(found) == 1 and len(seen) == 2
    close(next(iter(found.values()))["entropy"], figures["entropy"][0])
    close(by_layers(seen)["energy"], figures["energy"])
    assert len(traced(ea.record(with_jvp(lambda x: inner(x)[0]), "energy"), X)) == 2
    within = with_jvp(lambda x: second(first(x)))
    outer = ea.record(lambda x: ea.record(within, "entropy")(x)[0], "energy")
    assert len(traced(outer, X)) == 2


LAYER = ea.FreeEnergy()
BAD = {
    "ValueError function: wanted one that calls .*, got .*sin": lambda: ea.record(jnp.sin)(X),
    "TypeError function: wanted a function or a module, got int 3": lambda: ea.record(3),
    "ValueError wanted energy, .* .did you mean 'entropy'.., got 'entropie'": lambda: ea.record(
        LAYER, "entropie"
    ),
    r"ValueError no arguments, got 'sample'; .*sample=lambda F": lambda: ea.record(LAYER, "sample"),
    "ValueError got '_part'|got '__call__'": lambda: ea.record(LAYER, "__call__"),
    "ValueError each once, got 'energy' twice": lambda: ea.record(LAYER, "energy", "energy"),
    "TypeError quantities: .* are keywords": lambda: ea.record(LAYER, lambda F: F()),
    "TypeError mine: wanted a function of a Gibbs, got": lambda: ea.record(LAYER, mine="energy"),
    "TypeError name: wanted a text or None, got int 3": lambda: ea.FreeEnergy(name=3),
}


@pytest.mark.parametrize("wanted", BAD)
def test_bad_input(wanted, unchecked):
    """An empty recording of a model that attends by other means; a name that is taken for a figure."""
    with refused(wanted):
        BAD[wanted]()


def test_names_in_a_decoder():
    """Layers that are told apart by a number alone; a name of one model in another, from JAX's caches."""
    model = Llama(CONFIG, key=jax.random.key(0))
    tokens = jnp.zeros((1, 6), jnp.int32)
    wanted = [f"layers[{i}].attention" for i in range(CONFIG.num_hidden_layers)]
    _, seen = ea.record(model, "energy")(tokens)
    assert list(seen) == wanted
    cache = model.empty_cache(batch=1, slots=8)
    _, chunks = ea.record(model.prefill, "energy")(tokens, cache, chunk_size=3)
    assert list(chunks) == wanted and chunks[wanted[0]]["energy"].shape[:2] == (2, 1)

    @jax.jit
    def shared(x):
        return ea.attention(x, x, x)

    attend = lambda q, k, v, **_: (shared(q), q[..., 0])  # noqa: E731
    _, alike = ea.record(functools.partial(model, attend=attend), "energy")(tokens)
    assert list(alike) == wanted
    x = jnp.ones((1, 6, 4, model.config.head_dim))
    assert list(ea.record(shared, "energy")(x)[1]) == ["attention"]


def test_a_reproducible_decoder():
    """A program among an operation's parameters that has constants of its own, and so is no closed program."""
    model = Llama(CONFIG, key=jax.random.key(0))
    tokens = jnp.arange(6)[None] % CONFIG.vocab_size

    def energies(**options):
        seen = ea.record(functools.partial(model, **options), "energy")(tokens)[1]
        return {name: x["energy"] for name, x in seen.items()}

    close(energies(reproducible=True), energies(), tolerance=1e-5)


def test_arrays_of_a_quantity_are_leaves():
    """A function of the measure that is compiled again for other arrays, or is constant in them."""
    traced = []

    def scaled(weight, measure):
        traced.append(weight)
        return weight * measure.entropy()

    def recorded(weight):
        of = jax.tree_util.Partial(scaled, weight)
        return ea.record(Layer(WEIGHTS[0]), of=of)(X)[1]["energy"]["of"]

    first = recorded(jnp.asarray(1.0))
    count = len(traced)
    close(recorded(jnp.asarray(2.0)), 2 * np.asarray(first))
    assert len(traced) == count > 0
    close(jax.grad(lambda w: recorded(w).sum())(jnp.asarray(1.0)), np.asarray(first).sum())
