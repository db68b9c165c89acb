"""The page "Beside other libraries": what it puts in the place of other libraries' attention, judged by theirs.

The blocks marked `py` are taken from the page and run here, each where its library is installed. Of these, the extra
`test` installs transformers; the others have requirements that do not go together.
"""

import importlib.util
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugs.md"
BLOCKS = dict(
    re.findall(r'^```py title="(\w+)\.py"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL)
)
# Of the largest entry: what sums of some hundred numbers lose in float32.
TOLERANCE = 100 * np.finfo(np.float32).eps

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("user_settings", "unchecked"),
    pytest.mark.filterwarnings("ignore"),  # what other libraries say of themselves
]


def run(*titles):
    """The names that blocks of the page define."""
    names = {}
    for title in titles:
        exec(compile(BLOCKS[title], f"{PAGE} {title}", "exec"), names)
    return SimpleNamespace(**names)


def close(found, wanted):
    """Trees with the same arrays; of gradients, some of which are zero, by the largest of all."""
    found, wanted = map(jax.tree.leaves, (found, wanted))
    largest = max(float(np.abs(x).max()) for x in wanted)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE * largest)


def test_blocks_are_short():
    """More than thirty lines for a library, or lines that a narrow page breaks."""
    assert len(BLOCKS) == 5
    for title, block in BLOCKS.items():
        lines = [line for line in block.splitlines() if line.strip()]
        assert len(lines) <= 30 and max(map(len, lines)) <= 80, title


@pytest.mark.parametrize("masked", ["nothing", "pairs", "keys of a row"])
@pytest.mark.parametrize("biased", [False, True])
def test_haliax(masked, biased):
    """Names that end up on another axis, a mask or a bias of fewer axes, in values or in gradients."""
    hax = pytest.importorskip("haliax")
    ours = run("named_axes", "haliax_attention").dot_product_attention
    Batch, Head, Group, Pos, KPos, Key = hax.make_axes(
        batch=3, head=2, group=4, position=12, keys=15, width=8
    )
    keys = jax.random.split(jax.random.key(0), 6)
    axes = (Batch, Head, Group, Pos, Key), (Batch, KPos, Head, Key), (KPos, Batch, Head, Key)
    arrays = [hax.random.normal(key, x) for key, x in zip(keys, axes, strict=False)]
    masks = {"pairs": (Pos, KPos), "keys of a row": (Batch, KPos)}
    mask = hax.random.normal(keys[3], masks[masked]) > -1 if masked in masks else None
    if biased:
        arrays.append(hax.random.normal(keys[4], (Head, Pos, KPos)))
    towards = hax.random.normal(keys[5], axes[0])

    def values_and_gradients(attend):
        def loss(query, key, value, bias=None):
            out = attend(KPos, Key, query, key, value, mask=mask, bias=bias)
            return hax.sum(out * towards).scalar(), out.rearrange(axes[0])

        which = tuple(range(len(arrays)))
        return jax.jit(jax.grad(loss, argnums=which, has_aux=True))(*arrays)

    found, wanted = map(values_and_gradients, (ours, hax.nn.attention.dot_product_attention))
    close(found[1], wanted[1])
    close([x.rearrange(y.axes) for x, y in zip(found[0], wanted[0], strict=True)], wanted[0])


@pytest.mark.parametrize("mask", ["causal", "window", "segments", "array", "none"])
def test_levanter(mask, monkeypatch):
    """A mask of Levanter's that is lost, or a layer that does not come by here: logits and gradients of a Llama."""
    pytest.importorskip("levanter")
    import equinox as eqx
    import haliax as hax
    from levanter.layers import attention
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    theirs = attention.dot_product_attention
    monkeypatch.setattr(attention, "dot_product_attention", theirs)  # and back
    ours = run("named_axes", "levanter_attention").levanter_attention
    assert attention.dot_product_attention is ours
    size = {"hidden_dim": 32, "intermediate_dim": 48, "num_layers": 2, "max_seq_len": 24}
    config = LlamaConfig(num_heads=4, num_kv_heads=2, gradient_checkpointing=False, **size)
    Vocab, Batch, Pos = hax.Axis("vocab", 64), hax.Axis("batch", 2), config.max_Pos
    model = LlamaLMHeadModel.init(Vocab, config, key=jax.random.key(0))
    tokens = hax.random.randint(jax.random.key(1), (Batch, Pos), 0, 64)
    documents = hax.named(jnp.arange(48).reshape(2, 24) // 13, (Batch, Pos))
    pairs = jax.random.bernoulli(jax.random.key(2), 0.5, (24, 24)) | jnp.eye(24, dtype=bool)
    pairs = hax.named(pairs, (Pos, Pos.alias("key_position")))
    of_them = attention.AttentionMask
    given = {
        "causal": of_them.causal(),
        "window": of_them.causal(sliding_window=5),
        "segments": of_them.causal(segment_ids=(documents, documents)),
        "array": of_them.explicit(pairs) & of_them.causal(),
        "none": None,
    }[mask]

    def values_and_gradients(attend):
        attention.dot_product_attention = attend

        def loss(model):
            logits = model(tokens, attn_mask=given)
            return hax.mean(hax.nn.logsumexp(logits, Vocab) ** 2).scalar(), logits

        return eqx.filter_jit(eqx.filter_grad(loss, has_aux=True))(model)

    found, wanted = map(values_and_gradients, (ours, theirs))
    close(found[1], wanted[1])
    close(found[0], wanted[0])


@pytest.fixture
def maxtext(monkeypatch):
    """A small configuration of MaxText with given fields; its attention, and ours in its place."""
    pytest.importorskip("maxtext")
    from maxtext.configs import pyconfig
    from maxtext.layers import attention_op
    from maxtext.utils import maxtext_utils

    theirs = attention_op.AttentionOp.apply_attention
    monkeypatch.setattr(attention_op.AttentionOp, "apply_attention", theirs)  # and back
    ours = run("maxtext_attention").apply_attention
    assert attention_op.AttentionOp.apply_attention is ours

    def configured(**fields):
        base = Path(importlib.util.find_spec("maxtext").origin).parent / "configs" / "base.yml"
        sizes = {
            "base_emb_dim": 32,
            "base_num_query_heads": 4,
            "base_num_kv_heads": 2,
            "base_num_decoder_layers": 2,
            "base_mlp_dim": 64,
            "head_dim": 8,
            "max_target_length": 16,
            "vocab_size": 64,
            "per_device_batch_size": 2,
            "dtype": "float32",
            "weight_dtype": "float32",
            "attention": "dot_product",
            "hardware": "cpu",
            "enable_checkpointing": False,
            "enable_goodput_recording": False,
            "log_config": False,
            "run_name": "test",
            "skip_jax_distributed_system": True,
            "allow_split_physical_axes": True,
        }
        config = pyconfig.initialize(["", str(base)], **sizes, **fields)
        return config, maxtext_utils.get_mesh_from_config(config, devices=jax.devices()[:1])

    def both(call):
        for attend in (ours, theirs):
            attention_op.AttentionOp.apply_attention = attend
            yield call()

    return SimpleNamespace(configured=configured, both=both)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_maxtext(maxtext, cap):
    """A layer that does not come by here, or scores scaled twice: logits and gradients of MaxText's decoder."""
    from flax import nnx
    from maxtext.utils import model_creation_utils

    config, mesh = maxtext.configured(attn_logits_soft_cap=cap)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 64)
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))
    documents = jnp.where(positions < 9, 1, 2)
    with jax.set_mesh(mesh):
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(params=0))

        def values_and_gradients():
            def loss(model):
                logits = model(tokens, positions, documents, enable_dropout=False)
                return (jax.nn.logsumexp(logits, -1) ** 2).mean(), logits

            return nnx.jit(nnx.grad(loss, has_aux=True))(model)

        found, wanted = maxtext.both(values_and_gradients)
    close(found[1], wanted[1])
    close(found[0], wanted[0])


@pytest.mark.parametrize("kind", ["global", "local_sliding", "chunk", "full", "images", "decode"])
def test_maxtext_operator(maxtext, kind):
    """A window, a chunk, images that see both ways, or the merge of two caches, that are not MaxText's."""
    from maxtext.layers.attention_op import AttentionOp

    config, mesh = maxtext.configured()
    options = {} if kind in ("images", "decode") else {"attention_type": kind}
    sizes = {"max_target_length": 16, "num_query_heads": 4, "num_kv_heads": 2}
    windows = {"sliding_window_size": 5, "chunk_attn_window_size": 4}
    keys = jax.random.split(jax.random.key(0), 5)
    with jax.set_mesh(mesh):
        attend = AttentionOp(
            config, mesh, "dot_product", max_prefill_predict_length=8, **sizes, **windows, **options
        )
        if kind == "decode":
            query = jax.random.normal(keys[0], (2, 1, 4, 8))
            k, v, k_new, v_new = (jax.random.normal(key, (2, 8, 2, 8)) for key in keys[1:])
            lengths = jnp.array([3, 5])
            written = (jnp.arange(8) < lengths[:, None]).astype(jnp.int32)
            caches = (k, v, jnp.ones((2, 8), jnp.int32)), (k_new, v_new, written, lengths)
            call = partial(
                attend, query, None, None, None, None, "autoregressive", cached_values=caches
            )
        else:
            query = jax.random.normal(keys[0], (2, 16, 4, 8))
            k, v = (jax.random.normal(key, (2, 16, 2, 8)) for key in keys[1:3])
            documents = jnp.where(jnp.arange(16) < jnp.array([9, 16])[:, None], 1, 2)
            images = jnp.arange(16)[None] // 3 % 2 == 1 if kind == "images" else None
            call = partial(attend, query, k, v, documents, None, "train", bidirectional_mask=images)
        found, wanted = maxtext.both(call)
    close(found, wanted)


def test_transformers():
    """Weights under other names, transposed or scaled: logits, and gradients of the projections of both layers."""
    pytest.importorskip("torch")
    page = run("transformers_weights")
    close(page.logits, page.wanted.detach().numpy())

    (page.wanted**2).mean().backward()
    tokens = jnp.asarray(page.tokens.numpy(), jnp.int32)
    slope = jax.jit(jax.grad(lambda model: (model(tokens).logits ** 2).mean()))(page.ours)
    layers = zip(slope.layers, page.theirs.model.layers, strict=True)
    pairs = [
        (getattr(x.self_attn, name).weight, getattr(y.self_attn, name).weight.grad.numpy())
        for x, y in layers
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ]
    close(*zip(*pairs, strict=True))
