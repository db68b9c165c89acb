"""The adapters of vendors' kernels, on a CPU: cuDNN and FlashAttention emulated with their quirks, splash interpreted.

What an adapter does (layouts, options, the cotangent of lse, what it declines) is ours and tested here. What the
vendors' kernels do is tested on a GPU alone.
"""

import functools
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from energy_attn.kernels import AttentionState, local_attention
from energy_attn.kernels.call._kernel import lowered_for
from energy_attn.kernels.dispatch import _probe
from energy_attn.kernels.internal import AssumedGPU, check_call_of, platform_here, private_names
from energy_attn.kernels.vendor import _adapter, _gpu, _splash
from tests.support.naive import assert_all_close, select
from tests.support.problems import _make, call_of, cast, cotangents, problem_call
from tests.support.reference import visible
from tests.support.selection import few, few_rows

KERNELS = {"cudnn": _gpu.CuDNN, "flash": _gpu.FlashAttn, "fa4": _gpu.FA4, "splash": _splash.Splash}


# As the vendors compute: statistics in float32 as [B, N, T], weights and the gradient of scores rounded to 16 bits, the
# maximum taken before the scale is applied, delta from out and its cotangent alone.
def raw_scores(query, key, seen):
    assert query.dtype == key.dtype and query.dtype.itemsize == 2
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32)
    return jnp.where(seen, scores, -jnp.inf)


def forward(query, key, value, *, seen, scale, blind):
    assert value.shape == key.shape and value.dtype == key.dtype
    scores = raw_scores(query, key, seen)
    largest = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores * scale - largest * scale)
    total = weights.sum(-1, keepdims=True)
    value = jnp.repeat(value, query.shape[2] // key.shape[2], axis=2)
    weights = (weights / total).astype(value.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", weights, value, preferred_element_type=jnp.float32)
    lse = jnp.where(jnp.isfinite(largest), largest * scale + jnp.log(total), blind)
    return out.astype(value.dtype), lse[..., 0]


def backward(query, key, value, lse, out, d_out, *, seen, scale, sum_rounded):
    assert out.shape == d_out.shape == query.shape and value.shape == key.shape
    assert {x.dtype for x in (query, key, value, out, d_out)} == {query.dtype}
    assert lse.dtype == jnp.float32
    assert lse.shape == (query.shape[0], query.shape[2], query.shape[1])
    group, dtype = query.shape[2] // key.shape[2], query.dtype
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    weights = jnp.exp(raw_scores(query, key, seen) * scale - lse[..., None])
    wide_key, wide_value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1).transpose(0, 2, 1)
    d_weights = product("btnh,bsnh->bnts", d_out, wide_value)
    d_scores = (weights * (d_weights - delta[..., None])).astype(dtype)
    d_query = product("bnts,bsnh->btnh", d_scores, wide_key) * scale
    d_key = product("bnts,btnh->bsnh", d_scores, query) * scale
    d_value = product("bnts,btnh->bsnh", weights.astype(dtype), d_out)

    def over_groups(x):
        if sum_rounded:
            x = x.astype(dtype).astype(jnp.float32)
        return x.reshape(*key.shape[:3], group, -1).sum(3).astype(dtype)

    return d_query.astype(dtype), over_groups(d_key), over_groups(d_value)


def aligned(query, key, left, right, last=True):
    """The keys in a window (None: without a side), which aligns the last query and the last key, or the first ones."""
    behind = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
    behind += (key.shape[1] - query.shape[1]) * last
    seen = np.ones(behind.shape, bool) if right is None else behind >= -right
    return seen if left is None else seen & (behind <= left)


class Calls:
    """The emulated kernels of a vendor, and how often each was called."""

    def __init__(self):
        self.forwards = self.backwards = 0


class FakeCuDNN(Calls):
    def seen(self, query, key, mask_type, sliding_window_length):
        causal = mask_type.name in ("CAUSAL", "PADDING_CAUSAL")
        if sliding_window_length is not None:
            assert causal and sliding_window_length > 0
        left = None if sliding_window_length is None else sliding_window_length - 1
        return aligned(query, key, left, 0 if causal else None, last=False)

    def call(self, run, query, key, *arrays, layout, seed, dropout_rate, variadic_args, **options):
        assert layout == 0 and dropout_rate == 0 and variadic_args == (False, False)
        # parameters of newer versions of JAX: functions of the scores
        assert options.pop("score_mod_name", None) is options.pop("score_mod_jaxpr", None) is None
        scale = options.pop("scale")
        values, (bias, *lengths, a, b, c, d), others = arrays[:1], arrays[1:8], arrays[8:]
        assert all(x.shape == (0,) for x in (bias, a, b, c, d))
        seen = self.seen(query, key, **options)
        if not options["mask_type"].name.startswith("PADDING"):
            assert all(x.shape == (0,) for x in lengths)
            return run(query, key, *values, *others, seen=seen, scale=scale)
        assert all(x.shape == query.shape[:1] and x.dtype == jnp.int32 for x in lengths)
        there = [
            jnp.arange(x.shape[1], dtype=jnp.int32)[None] < jnp.where(n > x.shape[1], 0, n)[:, None]
            for x, n in zip((query, key), lengths, strict=True)
        ]
        seen = seen[None, None] & there[0][:, None, :, None] & there[1][:, None, None, :]
        found = run(query, key, *values, *others, seen=seen, scale=scale)
        # nothing is said of what is written beyond the lengths, of `lse` [B, N, T] neither
        rows = [there[0], *there[1:] * 2] if others else [there[0]]
        places = [
            jnp.where(n[..., None, None], x, jnp.nan) for x, n in zip(found, rows, strict=False)
        ]
        return places if others else (*places, jnp.where(there[0][:, None], found[1], jnp.nan))

    def bind_forward(self, *args, is_training, **options):
        assert is_training  # or there are no statistics
        self.forwards += 1
        return self.call(functools.partial(forward, blind=-jnp.inf), *args, **options)

    def bind_backward(self, *args, **options):
        self.backwards += 1
        return self.call(functools.partial(backward, sum_rounded=False), *args, **options)


class FakeFlash(Calls):
    def seen(self, query, key, is_causal, window_size_left, window_size_right):
        right = 0 if is_causal else window_size_right
        return aligned(query, key, *(None if x < 0 else x for x in (window_size_left, right)))

    def forward(self, query, key, value, *, softmax_scale, **options):
        self.forwards += 1
        seen = self.seen(query, key, **options)
        return forward(query, key, value, seen=seen, scale=softmax_scale, blind=jnp.inf)

    def backward(self, d_out, query, key, value, out, lse, *, softmax_scale, **options):
        self.backwards += 1
        seen = self.seen(query, key, **options)
        arrays = (query, key, value, lse, out, d_out)
        return backward(*arrays, seen=seen, scale=softmax_scale, sum_rounded=True)


class FakeFA4(Calls):
    def seen(self, query, key, config):
        assert not (config.causal and config.local)
        left, right = config.window if config.local else (None, 0 if config.causal else None)
        return aligned(query, key, left, right)

    def fwd_lse(self, config, query, key, value, aux):
        self.forwards += 1
        assert aux == () and config.backend == "cute" and config.mask is None
        seen = self.seen(query, key, config)
        return forward(query, key, value, seen=seen, scale=config.scale, blind=-jnp.inf)

    def vjp(self, config, query, key, value, out, lse, d_out, d_lse, aux):
        self.backwards += 1
        assert aux == () and d_lse is None  # which it does not take
        seen = self.seen(query, key, config)
        arrays = (query, key, value, lse, out, d_out)
        return backward(*arrays, seen=seen, scale=config.scale, sum_rounded=False)


@pytest.fixture
def vendor(monkeypatch):
    """A vendor's kernel by name, for CPUs, and the emulation beneath it."""
    if platform_here() != "cpu":
        pytest.skip("emulated on CPUs")

    def emulated(name):
        kernel = KERNELS[name]()
        monkeypatch.setattr(KERNELS[name], "platforms", ("cpu",))
        calls = {"cudnn": FakeCuDNN, "flash": FakeFlash, "fa4": FakeFA4}[name]()
        if name == "cudnn":
            for side in ("forward", "backward"):
                bound = SimpleNamespace(bind=getattr(calls, f"bind_{side}"))
                monkeypatch.setattr(private_names("cudnn"), side, bound)
        else:
            package = calls
            if name == "fa4":
                package = SimpleNamespace(Config=SimpleNamespace, backend=lambda _: calls)
            monkeypatch.setattr(_gpu, f"{name}_package", lambda: package)
        assert _probe.obstacle(kernel, "cpu") is None
        calls.forwards = calls.backwards = 0
        return kernel, calls

    return emulated


SPLASH_KERNEL = _splash.Splash(blocks=(128,))


def attend(arrays, problem, kernel):
    return local_attention(**arrays, **problem.options, implementation=kernel)


def broken_beyond(problem, name, x):
    """The array with NaN where a length says that nothing is."""
    lengths = problem.query_seq_lengths if name == "query" else problem.key_value_seq_lengths
    if x is None or lengths is None:
        return x
    there = np.arange(x.shape[1]) < np.asarray(lengths)[:, None]
    return jnp.where(there.reshape(*there.shape, *[1] * (x.ndim - 2)), x, jnp.nan)


def check(kernel, problem, dtype="bfloat16", cases=("both", "out", "lse")):
    arrays, _ = cast(problem, dtype)

    @jax.jit
    def run(arrays, dout, dlse):
        state, back = jax.vjp(lambda arrays: attend(arrays, problem, kernel), arrays)
        return state._asdict() | back(AttentionState(dout, dlse))[0]

    arrays = {n: broken_beyond(problem, n, x) for n, x in arrays.items()}
    for which in cases:
        given = select(which, *cotangents(problem, dtype))
        found = run(arrays, *(broken_beyond(problem, "query", x) for x in given))
        assert_all_close(found, problem, jnp.dtype(dtype), which, label=kernel.name)


def named(*problems):
    return {problem.name: problem for problem in problems}


SIZES = {"B": 2, "T": 64, "S": 64, "N": 4, "K": 2, "H": 16}
TAKEN = named(
    _make("vendor_plain", **SIZES | {"S": 96}),
    _make("vendor_more_queries", **SIZES | {"T": 96, "K": 4}, scale=0.7),
    _make("vendor_causal", **SIZES, is_causal=True),
    _make("vendor_window_causal", **SIZES, is_causal=True, local_window_size=(5, 3)),
    _make("vendor_window_left", **SIZES | {"K": 1}, local_window_size=(9, 0)),
    _make("vendor_window_diagonal", **SIZES, is_causal=True, local_window_size=0),
    _make("vendor_window_all", **SIZES, is_causal=True, local_window_size=63),
)
FLASH_ALONE = named(
    _make("vendor_few", **SIZES | {"T": 1, "S": 7}),
    _make("vendor_window", **SIZES | {"T": 23, "S": 23}, local_window_size=(3, 5)),
    _make("vendor_window_right", **SIZES, local_window_size=(64, 5)),
)
LENGTHS = {"query_seq_lengths": np.array([64, 9]), "key_value_seq_lengths": np.array([23, 64])}
RAGGED = named(
    _make("ragged_keys", **SIZES | {"S": 96}, key_value_seq_lengths=np.array([96, 0])),
    _make("ragged_causal", **SIZES, is_causal=True, **LENGTHS),
    _make("ragged_window", **SIZES, is_causal=True, local_window_size=(9, 0), **LENGTHS),
)
CASES = [(name, p) for name in ("cudnn", "flash", "fa4") for p in TAKEN.values()]
CASES += [(name, p) for name in ("flash", "fa4") for p in FLASH_ALONE.values()]
# groups of heads, other numbers of keys, a scale and windows; which keys are seen, `test_what_is_seen` asks of all
JUDGED = (("cudnn", "vendor_plain"), ("flash", "vendor_more_queries"), ("fa4", "vendor_window"))
CASES.sort(key=lambda case: (case[0], case[1].name) not in JUDGED)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param(*CASES[0], marks=pytest.mark.smoke),
        *CASES[1 : len(JUDGED)],
        *few_rows(CASES[len(JUDGED) :], 0),
    ],
    ids=str,
)
def test_state_and_gradients(name, problem, vendor):
    """Layouts, heads' groups, a window off by one, the cotangent of lse dropped or doubled."""
    check(vendor(name)[0], problem)


@pytest.mark.skipif(platform_here() != "cuda", reason="wanted a GPU")
@pytest.mark.parametrize(
    ("implementation", "problem"), CASES + [("cudnn", x) for x in RAGGED.values()], ids=str
)
def test_on_a_gpu(implementation, problem):
    """A vendor's kernel that computes something else than its emulation."""
    kernel = KERNELS[implementation]()
    if reason := _probe.obstacle(kernel, "cuda"):
        pytest.skip(reason)
    check(kernel, problem)


@pytest.mark.parametrize("problem", RAGGED.values(), ids=str)
def test_lengths(problem, vendor):
    """Rows of any length without the vendor: positions, or what it leaves behind a length, in a state or gradient."""
    kernel, calls = vendor("cudnn")
    check(kernel, problem)
    assert calls.forwards and calls.backwards


def test_lengths_under_vmap(vendor):
    """Lengths of one of the mapped calls for all, or beyond the keys, of which cuDNN would read what is behind them."""
    kernel, calls = vendor("cudnn")
    arrays, _ = cast(RAGGED["ragged_causal"], "bfloat16")

    def run(arrays, length):
        options = {"is_causal": True, "key_value_seq_lengths": length}
        return local_attention(**arrays, **options, implementation=kernel)

    lengths = jnp.array([23, 64], jnp.int32)
    found = jax.jit(jax.vmap(run))(arrays, jnp.array([23, 999], jnp.int32))
    assert calls.forwards == 1
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(run)(arrays, lengths))


@pytest.mark.parametrize(("name", "problem"), CASES, ids=str)
def test_what_is_seen(name, problem, vendor, monkeypatch):
    """A side of a window that is off by one, lost, or the other; forward or backward."""
    (kernel, calls), found = vendor(name), []
    of_vendor = type(calls).seen

    def seen(*args, **options):
        found.append(of_vendor(calls, *args, **options))
        return found[-1]

    monkeypatch.setattr(calls, "seen", seen)

    def run(arrays):
        call = call_of(**arrays, **problem.options, platform="cuda")
        kernel.check(call)
        state = kernel.forward(call)
        return kernel.backward(call, state, state)

    jax.eval_shape(run, {n: x.astype(jnp.bfloat16) for n, x in problem.arrays.items()})
    assert len(found) == 3  # of the backwards, one is for the cotangent of lse
    for x in found:
        np.testing.assert_array_equal(x, visible(problem)[0, 0])


@pytest.mark.parametrize("name", few(["cudnn", "flash"], "flash"))
def test_float16(name, vendor):
    """A fixed dtype instead of that of the operands."""
    check(vendor(name)[0], TAKEN["vendor_causal"], "float16", cases=("both",))


def test_cotangent_of_lse_in_two_parts():
    """dlse rounded to 16 bits, so that delta loses its lower bits."""
    lse = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 2)), jnp.float32)
    value, out = (jnp.zeros((1, n, 2, 8), jnp.bfloat16) for n in (5, 3))
    ones, zero, parts = map(np.asarray, jax.jit(_adapter._lse_operands)(value, out, lse))
    found = (parts.astype(np.float32) * ones[:, :1].astype(np.float32)).sum(-1)
    np.testing.assert_allclose(found, lse, rtol=2.0**-16)
    assert zero.shape == out.shape and not zero.any()


@pytest.mark.parametrize("name", ["cudnn", "flash", "fa4"])
def test_no_second_backward_without_need(name, vendor):
    """A second backward for a cotangent of out alone, the common case."""
    kernel, calls = vendor(name)
    arrays, _ = cast(TAKEN["vendor_causal"], "bfloat16")

    def loss(arrays, part):
        state = attend(arrays, TAKEN["vendor_causal"], kernel)
        return sum(x.astype(jnp.float32).sum() for x in part(state))

    jax.jit(lambda a: jax.grad(loss)(a, lambda state: (state.out,))).lower(arrays)
    assert (calls.forwards, calls.backwards) == (1, 1)
    jax.jit(lambda a: jax.grad(loss)(a, lambda state: state)).lower(arrays)
    assert (calls.forwards, calls.backwards) == (2, 3)


def of_cosines(problem, kernel, arrays):
    """The state, and the gradients for cotangents that are made of it."""
    state, back = jax.vjp(lambda arrays: attend(arrays, problem, kernel), arrays)
    return state, back(AttentionState(jnp.ones_like(state.out), jnp.cos(state.lse)))[0]


@pytest.mark.parametrize(
    ("name", "batched"),
    few_rows(
        [
            ("cudnn", ("query", "key", "value")),
            ("flash", ("query",)),
            ("cudnn", ("value",)),
            ("flash", ("query", "key", "value")),
        ],
        2,
    ),
    ids=str,
)
def test_vmap(name, batched, vendor):
    """Gradients of vmapped calls in another order (the vendor's own rule), or an operand of too small a batch."""
    kernel, _ = vendor(name)
    problem = TAKEN["vendor_window_causal"]
    arrays, _ = cast(problem, "bfloat16")
    arrays = {n: x if n in batched else x[0] for n, x in arrays.items()}
    axes = {n: 0 if n in batched else None for n in arrays}

    gradients = functools.partial(of_cosines, problem, kernel)
    found = jax.jit(jax.vmap(gradients, in_axes=(axes,)))(arrays)
    rows = [{n: x[i] if n in batched else x for n, x in arrays.items()} for i in range(2)]
    alone = jax.jit(gradients)
    wanted = jax.tree.map(lambda *x: np.stack(x), *map(alone, rows))
    # compiled differently, intermediate bfloat16 numbers are rounded differently
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, atol=0.1)


def test_global_state_in_the_backward(vendor):
    """Weights relative to a shard of the keys, where a ring passes the state of all of them."""
    kernel, _ = vendor("cudnn")
    problem = TAKEN["vendor_plain"]
    call = problem_call(problem, "bfloat16", "cuda")
    operands = call.operands
    whole = jax.jit(lambda x: kernel.forward(call._replace(operands=x)))(operands)
    half = operands._replace(key=operands.key[:, :64], value=operands.value[:, :64])
    cotangent = AttentionState(*cotangents(problem, "bfloat16"))

    @jax.jit
    def pull(operands):
        found = kernel.backward(call._replace(operands=operands), whole, cotangent)
        return found.key.astype(jnp.float32), found.value.astype(jnp.float32)

    for found, wanted in zip(pull(half), pull(operands), strict=True):
        np.testing.assert_allclose(found, wanted[:, :64], atol=0.02)


@pytest.fixture
def installed(monkeypatch):
    """The packages of vendors' kernels, as far as checks look for them."""
    for package in ("flash_package", "fa4_package"):
        monkeypatch.setattr(_gpu, package, lambda: None)


ALL = tuple(KERNELS)
BASE = _make("vendor_base", B=1, T=128, S=128, N=2, H=64)
POSITIONS = np.arange(128, dtype=np.int32)[None]
IDS = {"query_segment_ids": POSITIONS, "key_segment_ids": POSITIONS}
LENGTH = {"key_value_seq_lengths": POSITIONS[0, 5:6]}


def each(change):
    return {name: change(getattr(BASE, name)) for name in ("query", "key", "value")}


HALF = {name: x[:, :64] for name, x in each(lambda x: x).items() if name != "query"}
WIDTHS = "query: wanted a width that is a multiple of 8 up to .*, got "
DECLINED = (
    (ALL, {"source": 0 * BASE.query}, "query: wanted .*, got float32"),
    (ALL, {"bias": np.zeros((1, 1, 1, 1))}, "bias: wanted None"),
    (ALL, {"mask": np.ones((1, 1, 1, 1), bool)}, "mask: wanted None"),
    (ALL, {"query_positions": POSITIONS}, "query_positions: wanted None"),
    (("flash", "fa4"), LENGTH, "positions: wanted None"),
    (("cudnn", "flash", "fa4"), IDS, "query_segments: wanted None"),
    (ALL, {"scale": 0.0}, "scale: wanted a number above 0, got 0.0"),
    (ALL, {"scale": -0.5}, "scale: wanted a number above 0, got -0.5"),
    (ALL, {"value": BASE.value[..., :8]}, "value: wanted query's width, 64, got 8"),
    (ALL, {"query": BASE.query[:, :0]}, "query: wanted no empty axis"),
    (ALL, HALF | {"is_causal": True}, "query: wanted as many queries as keys .*, got 128 and 64"),
    (ALL, each(lambda x: x[..., :5]), f"{WIDTHS}5"),
    (ALL, each(lambda x: np.concatenate([x] * 5, -1)), f"{WIDTHS}320"),
    (("cudnn",), {"query": BASE.query[:, :63]}, "query: wanted at least 64 rows"),
    (("cudnn",), {"local_window_size": 5}, "window_size: wanted no keys after"),
    (("splash",), {"query": BASE.query[:, :63]}, "query: wanted a multiple of 128"),
    (("splash",), IDS | LENGTH, "query_segment_ids: wanted None with lengths"),
    (("splash",), {"scale": 0.3}, "scale: wanted a power of two, got 0.3"),
)
DECLINED = [
    *((*row, "bfloat16") for row in DECLINED),
    (ALL, {}, "query: wanted .*, got float32", "float32"),
    (("splash",), {}, "query: wanted bfloat16, got float16", "float16"),
]


@pytest.mark.parametrize(
    ("name", "changes", "reason", "dtype"),
    [(name, *case) for names, *case in DECLINED for name in names],
    ids=lambda x: x if isinstance(x, str) and ":" not in x else "",
)
def test_declines(name, changes, reason, dtype, installed):
    """A call that the kernel takes and computes wrongly, or fails at."""
    with pytest.raises(NotImplementedError, match=reason):
        check_call_of(KERNELS[name](), problem_call(replace(BASE, **changes), dtype))


@pytest.mark.parametrize(
    ("name", "found", "width", "reason"),
    [
        ("cudnn", (7, 5), 64, "cudnn: wanted a GPU of compute capability from 8.0 on, got 7.5"),
        ("cudnn", (8, 0), 64, None),
        ("cudnn", (8, 9), 192, "up to 128, got 192"),
        ("cudnn", (9, 0), 256, None),
        ("cudnn", (9, 0), 264, "up to 256, got 264"),
        ("cudnn", (10, 0), 256, "up to 128, got 256"),
        ("cudnn", None, 256, None),
        ("flash", (10, 0), 64, "from 8.0 to below 10.0, got 10.0"),
        ("flash", (9, 0), 64, None),
        ("fa4", (9, 0), 64, "at hand"),
        ("fa4", None, 256, None),
    ],
)
def test_capabilities(name, found, width, reason, installed):
    """A GPU that a vendor's library does not know, or a width that it has on others: XLA would fail at it."""
    call = call_of(*(jnp.zeros((1, 128, 2, width), jnp.bfloat16),) * 3)
    with gpu(found):
        declined(KERNELS[name](), call, reason)


def gpu(capability):
    """While a program is lowered for a GPU of a compute capability; None: for one that is not known."""
    device = None if capability is None else AssumedGPU("{}.{}".format(*capability))
    return lowered_for(device)


def declined(kernel, call, reason):
    if reason is None:
        return kernel.check(call)
    with pytest.raises(NotImplementedError, match=reason):
        kernel.check(call)


@pytest.mark.parametrize(
    ("found", "width", "reason"),
    [
        (None, 256, None),
        (91000, 64, "wanted a version other than 9.10.0 and 9.10.1, got 91000"),
        (91200, 128, None),
        (91200, 136, "up to 128 before cuDNN 9.13, got 136 and cuDNN 91200"),
        (91300, 256, None),
    ],
)
def test_versions_of_cudnn(found, width, reason, monkeypatch):
    """A version that computes wrongly; one refused that is right; or none, where another machine compiles."""
    monkeypatch.setattr(_gpu, "cuda_version", lambda library: found)
    declined(KERNELS["cudnn"](), call_of(*(jnp.zeros((1, 64, 1, width), jnp.float16),) * 3), reason)


def test_fa4_for_the_gpu_at_hand(installed, monkeypatch):
    """Kernels for one GPU in a program for another: the package compiles for the default device."""
    monkeypatch.setattr(_gpu.jax, "devices", lambda: [SimpleNamespace(compute_capability="10.0")])
    for found, width, reason in (
        ((10, 0), 128, None),
        ((10, 0), 192, "up to 128, got 192"),
        ((9, 0), 64, "got a program for .9, 0. and .10, 0. at hand"),
    ):
        call = call_of(*(jnp.zeros((1, 64, 1, width), jnp.bfloat16),) * 3)
        with gpu(found):
            declined(KERNELS["fa4"](), call, reason)


def test_no_package(monkeypatch):
    """An ImportError from a call, or advice that omits the missing package."""
    for package in ("fa4_jax", "flash_attn_jax"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(_gpu, "flash_package", _gpu.flash_package.__wrapped__)
    private_names.cache_clear()
    call = problem_call(BASE, "bfloat16")
    declined(KERNELS["fa4"](), call, "pip install 'fa4-jax")
    advice = r"(?s)(?=.*pip install flash-attn-jax).*libcudart\.so\.12"
    declined(KERNELS["flash"](), call, advice)


@pytest.mark.parametrize("broken", [np.inf, np.nan])
def test_a_broken_energy_is_none_of_no_keys(broken):
    """FlashAttention-2 writes plus infinity for a NaN among the scores, as it does for a row without keys."""
    call = problem_call(BASE, "bfloat16")
    shape = call.operands.query.shape
    lse = np.zeros(shape[:-1], np.float32)
    lse[0, 1, 0] = broken
    given = jnp.zeros(shape, jnp.bfloat16), jnp.asarray(lse)
    for unrounded, dtype in ((False, jnp.bfloat16), (True, jnp.float32)):
        call = call._replace(settings=call.settings.needing(unrounded=unrounded))
        out, energy = map(np.asarray, _adapter.vendor_state(*given, call))
        assert out.dtype == dtype and energy.dtype == jnp.float32
        assert np.isnan(out[0, 1, 0]).all() and np.isnan(energy[0, 1, 0])
        assert np.isnan(out).sum() == shape[-1] and np.isnan(energy).sum() == 1


NARROW = {"H": 8, "scale": 0.5, "is_causal": True, "local_window_size": 130}
SPLASH = named(
    _make("splash_plain", B=2, T=128, S=256, N=2, K=1, H=64),
    _make("splash_causal", B=1, T=256, S=256, N=4, K=2, H=64, is_causal=True),
    _make("splash_window", B=1, T=256, S=256, N=1, H=64, local_window_size=(100, 20)),
    _make("splash_window_causal", 1, 256, 256, 1, **NARROW),
)


@pytest.mark.parametrize(
    "problem", few(list(SPLASH.values()), next(iter(SPLASH.values()))), ids=str
)
def test_splash(problem):
    """The kernels themselves: masks, heads' groups, scaled queries, and delta with the cotangent of lse in it."""
    check(SPLASH_KERNEL, problem)


RAGGED_SPLASH = named(
    _make(
        "splash_lengths",
        *(2, 256, 256, 2),
        K=1,
        H=64,
        is_causal=True,
        query_seq_lengths=np.array([256, 9]),
        key_value_seq_lengths=np.array([100, 256]),
    ),
    _make("splash_keys", *(2, 128, 256), H=64, key_value_seq_lengths=np.array([130, 0])),
    _make(
        "splash_segments",
        *(2, 128, 128),
        H=64,
        is_causal=True,
        query_segment_ids=(np.arange(128) // np.array([[50], [30]])).astype(np.int32),
        key_segment_ids=(np.arange(128) // np.array([[50], [40]])).astype(np.int32),
    ),
)


@pytest.mark.parametrize("problem", RAGGED_SPLASH.values(), ids=str)
def test_splash_lengths_and_segments(problem):
    """Rows without keys, of which the kernels make the mean of all values, or what is behind a length, NaN included."""
    check(SPLASH_KERNEL, problem, cases=("both",))


@pytest.mark.parametrize(
    ("keys", "blocks", "kernels"),
    [
        pytest.param(256, (256,), 1, marks=pytest.mark.smoke),
        *few_rows([(128, (128,), 1), (512, (256,), 2)], 0),
    ],
    ids=["fused_parts", "fused", "parts"],
)
def test_splash_blocks(keys, blocks, kernels):
    """A part of a block of keys lost; a sum that the kernel of all gradients rounds, or leaves to the caller."""
    kernel = _splash.Splash(blocks=blocks, computed=128, fewest=1)
    problem = _make("splash_blocks", *(1, keys, keys, 2), K=1, H=64, is_causal=True)
    call = problem_call(problem, "bfloat16")
    query, key = (x.swapaxes(1, 2) for x in call.operands.qkv[:2])
    assert kernel._blocks(query, key, call.settings).fused == (kernels == 1)
    check(kernel, problem, cases=("both",))


BLOCKS = [  # queries, keys, options, and the blocks of each
    (8192, 8192, {"is_causal": True}, (1024, 1024)),
    (4096, 4096, {"is_causal": True}, (512, 512)),
    (1024, 1024, {"is_causal": True}, (512, 512)),
    (1024, 1024, {}, (1024, 1024)),
    (384, 1024, {}, (128, 1024)),
    (32768, 32768, {"local_window_size": (1000, 0)}, (512, 512)),
]


@pytest.mark.parametrize(("queries", "keys", "options", "blocks"), BLOCKS, ids=str)
def test_blocks_of_splash(queries, keys, options, blocks):
    """Blocks of which most is hidden by the diagonal, or by a window."""

    def cut(query, key):
        call = call_of(query, key, key, **options)
        arrays = (x.swapaxes(1, 2) for x in call.operands.qkv[:2])
        found.append(_splash.Splash()._blocks(*arrays, call.settings))

    found = []
    shapes = (1, queries, 1, 64), (1, keys, 1, 64)
    jax.eval_shape(cut, *(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes))
    assert found[0][2:] == (*blocks, 512)


@pytest.mark.full
def test_splash_in_shard_map():
    """Results whose types lack the mesh axes they vary over, which JAX wants there."""
    problem = SPLASH["splash_plain"]
    arrays, _ = cast(problem, "bfloat16")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    gradients = functools.partial(of_cosines, problem, SPLASH_KERNEL)
    spec = jax.sharding.PartitionSpec("x")
    split = jax.shard_map(gradients, mesh=mesh, in_specs=spec, out_specs=spec)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(split)(arrays), jax.jit(gradients)(arrays))
