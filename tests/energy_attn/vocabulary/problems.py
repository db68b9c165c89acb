"""Output layers with random arrays, and what a dense softmax in float64 says of them."""

import jax
import jax.numpy as jnp
import numpy as np

import energy_attn as ea

WORDS, SHAPE = 300, (2, 3)  # three blocks of 128 words, of which the last overlaps
OPTIONS = {
    "plain": {},
    "everything": {
        "bias": True,
        "mask": True,
        "scale": 0.7,
        "temperature": np.linspace(0.5, 2, 3),
        "soft_cap": 3.0,
    },
}
ANSWERS = "log_partition log_prob entropy cross_entropy kl reverse_kl js likeliest loss loss_entropy".split()
LOSS = {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": -100}


def arrays(kind: str, width: int = 6, other_width: int = 4) -> dict[str, np.ndarray]:
    """Hidden states and output matrices of two models, and what the options of `kind` need."""
    rng = np.random.default_rng(0)
    made = {
        "hidden": rng.standard_normal((*SHAPE, width)),
        "weight": rng.standard_normal((WORDS, width)),
        "other_hidden": rng.standard_normal((*SHAPE, other_width)),
        "other_weight": rng.standard_normal((WORDS, other_width)),
    }
    if OPTIONS[kind].get("bias"):
        made["bias"] = rng.standard_normal(WORDS)
    return made


def static(kind: str) -> tuple[dict, np.ndarray, np.ndarray, np.ndarray]:
    """Options that are no arrays, the mask, labels that it allows, and labels of which one is ignored."""
    rng = np.random.default_rng(1)
    options = {x: y for x, y in OPTIONS[kind].items() if x not in ("bias", "mask")}
    mask = np.ones(WORDS, bool)
    if OPTIONS[kind].get("mask"):  # no word of the last of four devices is allowed
        mask = (rng.uniform(size=WORDS) > 0.3) & (np.arange(WORDS) < 220)
    labels = rng.choice(np.flatnonzero(mask), SHAPE)
    labels[0, 0] = np.flatnonzero(mask)[-1]  # in the last block
    ignoring = labels.copy()
    ignoring[1, 1] = -100
    return options, mask, labels, ignoring


def layers(kind, given, parallel=None):
    options, mask, _, _ = static(kind)
    p = ea.Categorical(
        given["hidden"],
        given["weight"],
        given.get("bias"),
        mask=jnp.asarray(mask) if not mask.all() else None,
        parallel=parallel,
        **{x: jnp.asarray(y) if isinstance(y, np.ndarray) else y for x, y in options.items()},
    )
    # the same words are allowed
    q = ea.Categorical(given["other_hidden"], given["other_weight"], mask=p.mask, parallel=parallel)
    return p, q


def answers(kind, given, parallel=None, top=True):
    """The library's answers: floats, and integers."""
    p, q = layers(kind, given, parallel)
    _, _, labels, ignoring = static(kind)
    labels, ignoring = jnp.asarray(labels), jnp.asarray(ignoring)
    loss, found = ea.softmax_cross_entropy(
        *(p.hidden, p.weight, ignoring),
        **{
            x: getattr(p, x)
            for x in ("bias", "mask", "scale", "temperature", "soft_cap", "parallel")
        },
        **LOSS,
        return_statistics=True,
    )
    values, words = p.top_k(4) if top else (p.log_prob(labels)[..., None], p.mode()[..., None])
    floats = (
        p.log_partition(),
        p.log_prob(labels),
        p.entropy(),
        p.cross_entropy(q),
        p.kl_divergence(q),
        q.kl_divergence(p),
        p.js_divergence(q),
        values,
        loss,
        found.entropy,
    )
    integers = p.mode(), words, p.sample(key=jax.random.key(7), shape=(2,)), found.is_correct
    return dict(zip(ANSWERS, floats, strict=True)), integers


def dense(kind, given, top=True):
    """The same of arrays of all logits."""
    options, mask, labels, ignoring = static(kind)
    cap, temperature = options.get("soft_cap"), options.get("temperature", 1.0)
    s = options.get("scale", 1.0) * given["hidden"] @ given["weight"].T
    s = s + (given["bias"] if "bias" in given else jnp.zeros(WORDS))[None, None]
    s = (s if cap is None else cap * jnp.tanh(s / cap)) / jnp.broadcast_to(
        jnp.asarray(temperature), SHAPE
    )[..., None]
    r = given["other_hidden"] @ given["other_weight"].T
    # a hidden word has no probability, and its logarithm is multiplied by 0
    s, r = (x[..., mask] for x in (s, r))
    log_p, log_q = jax.nn.log_softmax(s), jax.nn.log_softmax(r)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    log_m = jnp.log((p + q) / 2)
    place = jnp.asarray(np.cumsum(mask) - 1)
    at = jnp.take_along_axis(log_p, place[labels][..., None], -1)[..., 0]
    lse, counts = jax.nn.logsumexp(s, -1), ignoring != -100
    each = 0.9 * (lse - jnp.take_along_axis(s, place[labels][..., None], -1)[..., 0])
    each = each + 0.1 * (lse - s.mean(-1)) + 1e-2 * lse**2
    entropy = -(p * log_p).sum(-1)
    floats = (
        lse,
        at,
        entropy,
        -(p * log_q).sum(-1),
        (p * (log_p - log_q)).sum(-1),
        (q * (log_q - log_p)).sum(-1),
        0.5 * (p * (log_p - log_m) + q * (log_q - log_m)).sum(-1),
        jax.lax.top_k(log_p, 4)[0] if top else at[..., None],
        jnp.where(counts, each, 0.0).sum() / float(counts.sum()),
        entropy,
    )
    return dict(zip(ANSWERS, floats, strict=True))


def loss_of(f, *args, **options):
    """A number that every answer moves, each entry by another factor."""

    def loss(given):
        found = f(*args, given, **options)
        found = found[0] if isinstance(found, tuple) else found
        rng = np.random.default_rng(2)
        return sum((rng.standard_normal(x.shape) * jnp.sin(x)).sum() for x in found.values())

    return loss
