"""A toy policy gradient: samples on one mesh, trains on another, with and without reproducible bits.

The policy is the byte-level Llama that comes with the library, in bfloat16; its reward is the share of new bytes that
are lower-case letters. In each step texts are generated with the cache on four devices, their log-probabilities are
computed again by the forward of the training over 2 × 4 devices, and compared. `docs/reproducible.md` explains it; it
takes about five minutes.

    python examples/train_to_rollout.py --out docs/benchmarks/train_to_rollout.json
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

# Before JAX starts: eight simulated devices where there is no accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import energy_attn as ea
from energy_attn.cli.demo import byte_llama, held_out_text
from energy_attn.distributed import SequenceParallel, make_mesh
from energy_attn.models import generate

STEPS, ROWS, PROMPT, NEW = 50, 8, 104, 24
OPTIMISER = optax.adam(1e-4)


def in_bfloat16(model):
    """The policy that samples, and whose log-probabilities are trained; the weights themselves are float32."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)


# --8<-- [start:step]
def sample(model, prompts, key, reproducible):
    """New tokens and their log-probabilities, from a cache on four devices."""
    mesh = make_mesh((4,), ("device",), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        said = generate(
            in_bfloat16(model),
            prompts,
            NEW,
            temperature=1.0,
            key=key,
            parallel=SequenceParallel("device"),
            return_logprobs=True,
            reproducible=reproducible,
        )
    return jax.device_get((said.tokens, said.logprobs))  # to other devices


@partial(jax.jit, static_argnums=3)
def gradient(model, text, advantages, reproducible):
    """The policy gradient, and the log-probabilities that it computes, over 2 x 4 devices."""
    over = SequenceParallel("sequence", "ring", batch="data")

    def loss(model):
        new = in_bfloat16(model).log_probs(text, parallel=over, reproducible=reproducible)[
            :, PROMPT - 1 :
        ]
        return -(new * advantages[:, None]).sum() / new.size, new

    return jax.grad(loss, has_aux=True)(model)


@jax.jit
@ea.reproducible
def update(gradient, model, state):
    """Applies a step of the optimiser."""
    change, state = OPTIMISER.update(gradient, state, model)
    return eqx.apply_updates(model, change), state


# --8<-- [end:step]


def run(reproducible: bool, steps: int) -> dict[str, list[float]]:
    """The largest log-ratio, the mean divergence and the reward of each step."""
    text = held_out_text()
    rng, model = np.random.default_rng(0), byte_llama()
    state = OPTIMISER.init(model)
    mesh = make_mesh((2, 4), ("data", "sequence"))
    curves = {"log_ratio": [], "kl": [], "reward": []}
    for step in range(steps):
        first = rng.integers(0, len(text) - PROMPT, ROWS)
        prompts = jnp.asarray([text[i : i + PROMPT] for i in first.tolist()], jnp.int32)
        tokens, old = sample(model, prompts, jax.random.key(step), reproducible)
        reward = ((tokens >= ord("a")) & (tokens <= ord("z"))).mean(1)
        reward = np.asarray(reward, np.float32)
        with jax.set_mesh(mesh):
            whole = np.concatenate([prompts, tokens], 1)
            inputs = jnp.asarray(whole), jnp.asarray(reward - reward.mean()), reproducible
            change, new = gradient(model, *inputs)
            model, state = update(change, model, state)
        ratio = np.asarray(new, np.float64) - np.asarray(old, np.float64)
        model, state = jax.device_get((model, state))
        model, state = jax.tree.map(jnp.asarray, (model, state))
        curves["log_ratio"].append(float(np.abs(ratio).max()))
        curves["kl"].append(float((np.exp(ratio) - 1 - ratio).mean()))
        curves["reward"].append(float(reward.mean()))
        print(f"{step:3d} {curves['log_ratio'][-1]:.2e} {reward.mean():.2f}", flush=True)
    return curves


def draw(results: dict, path: Path) -> None:
    """The largest ratio of each step, as a picture."""
    from matplotlib import pyplot as plt

    figure, panel = plt.subplots(figsize=(6.4, 2.8), layout="constrained")
    for name, label in (("plain", "without"), ("reproducible", "reproducible=True")):
        panel.plot(results[name]["log_ratio"], label=label)
    panel.set(xlabel="step", ylabel="largest |log ratio|, nats", ylim=(-0.002, 0.07))
    panel.set_title("log-probabilities: sampled on 4 devices, trained on 2 × 4", fontsize=10)
    panel.legend(frameon=False, ncols=2, loc="upper right")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Writes the figures of both runs; returns 1 unless all ratios of the first are 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("train_to_rollout.json"))
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    results = {name: run(name == "reproducible", args.steps) for name in ("reproducible", "plain")}
    args.out.write_text(json.dumps({"jax": jax.__version__, **results}, indent=1) + "\n")
    draw(results, args.out.with_suffix(".svg"))
    exact = max(results["reproducible"]["log_ratio"]) == 0
    print(f"ratio exactly 1 in all steps: {exact}")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
