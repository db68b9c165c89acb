"""Means over the keys where energies are large, and are rounded otherwise than the scores of a second walk."""

import jax
import jax.numpy as jnp
import numpy as np

import energy_attn as ea
from energy_attn.distributed import SequenceParallel
from tests.support.compare import close
from tests.support.meshes import mesh_of

LEVEL, KEYS = 9000.0, 304
EPSILON = float(np.finfo(np.float32).eps)


def asked(P: ea.Gibbs, Q: ea.Gibbs, along: np.ndarray) -> dict[str, jax.Array]:
    statistics, (mean, variance) = P.statistics(), P.score_moments()
    return {
        "entropy": P.entropy(),
        "entropy of statistics": statistics.entropy,
        "mean": mean - LEVEL,
        "mean of statistics": statistics.mean_score - LEVEL,
        "variance": variance,
        "renyi": P.renyi(2),
        "least": P.renyi(np.inf),
        "divergence": P.kl(Q),
        "cross-entropy": P.cross_entropy(Q),
        "weights": P.weights(),
        "some": P.weights(rows=-1, keys=[3, 290]),
        "covariance": P.covariance(),
        "moment": P.moment([jnp.asarray(along)] * 3),
    }


def few_asked(P: ea.Gibbs, Q: ea.Gibbs) -> dict[str, jax.Array]:
    return {"entropy": P.entropy(), "divergence": P.kl(Q), "weights": P.weights()}


def exact(q, u, k, v, bias, along) -> dict[str, np.ndarray]:
    """By the weights themselves, in float64."""
    q, u, k, v, bias, along = (np.asarray(x, np.float64) for x in (q, u, k, v, bias, along))

    def scores(q):
        return np.einsum("tnh,snh->tns", q, k) / np.sqrt(q.shape[-1]) + bias[0, :, 0] - LEVEL

    def logs(scores):
        return scores - np.log(np.exp(scores).sum(-1, keepdims=True))

    own, P, Q = scores(q), logs(scores(q)), logs(scores(u))
    weights = np.exp(P)
    mean, entropy = (weights * own).sum(-1), -(weights * P).sum(-1)
    centred = v.swapaxes(0, 1) - np.einsum("tns,snh->tnh", weights, v)[0, :, None]
    return {
        "entropy": entropy,
        "entropy of statistics": entropy,
        "mean": mean,
        "mean of statistics": mean,
        "variance": (weights * own**2).sum(-1) - mean**2,
        "renyi": -np.log((weights**2).sum(-1)),
        "least": -P.max(-1),
        "divergence": (weights * (P - Q)).sum(-1),
        "cross-entropy": -(weights * Q).sum(-1),
        "weights": weights,
        "some": weights[..., [3, 290]],
        "covariance": np.einsum("tns,nsi,nsj->tnij", weights, centred, centred),
        "moment": (weights * np.einsum("tnh,snh->tns", along, v) ** 3).sum(-1),
    }


def test_one_row():
    """A mean that is off by the rounding of an energy times a score, by whole nats; in a union and over a mesh, too."""
    random = np.random.default_rng(0)
    q, u, along = random.normal(size=(3, 1, 2, 8)).astype(np.float32)
    k, v = random.normal(size=(2, KEYS, 2, 8)).astype(np.float32)
    bias = (LEVEL + random.normal(size=(1, 2, 1, KEYS))).astype(np.float32)

    def measures(q, u, k, v, bias, **options):
        return [ea.FreeEnergy(**options).at(x, k, v, bias=bias) for x in (q, u)]

    def in_parts(q, u, k, v, bias):
        cuts = slice(0, 100), slice(100, None)
        first, second = (measures(q, u, k[cut], v[cut], bias[..., cut]) for cut in cuts)
        return [x | y for x, y in zip(first, second, strict=True)]

    @jax.jit
    def run(q, u, k, v, bias):
        arrays = q, u, k, v, bias
        slope = jax.grad(lambda bias: measures(q, u, k, v, bias)[0].entropy().sum())(bias)
        return asked(*measures(*arrays), along=along), few_asked(*in_parts(*arrays)), slope

    arrays = q, u, k, v, bias
    wanted = exact(*arrays, along)
    # The scores, some six from their mean, are rounded to the precision of what is added to them.
    tolerance = 8 * EPSILON * LEVEL
    whole, parts, slope = run(*arrays)
    close(whole, wanted, "whole", tolerance)
    few = {name: wanted[name] for name in parts}
    close(parts, few, "parts", tolerance)
    weights = wanted["weights"]
    change = -weights * (np.log(weights) + wanted["entropy"][..., None])
    close(slope, change.swapaxes(0, 1)[None], "slope", tolerance)
    close(whole["weights"].sum(-1), np.ones((1, 2)), "sums", 8 * EPSILON)

    @jax.jit
    def sharded(q, u, k, v, bias):
        P, Q = measures(q, u, k, v, bias, parallel=SequenceParallel("device"))
        return few_asked(P, Q)

    with jax.set_mesh(mesh_of("8")):
        close(sharded(*arrays), few, "mesh", tolerance)
