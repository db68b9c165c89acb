"""What a model's attention over a mesh takes, by the cost model, by each method and in each layout."""

import dataclasses
import functools
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from energy_attn.distributed import cost, plan

from ..models import Llama, LlamaConfig
from ..models.llama._experts import Experts

LAYOUTS = "contiguous", "zigzag", "striped"
# How each method folds or rotates, where it has a choice: a tree over sharded queries has two ways to scatter states.
MERGES = {"tree": ("allreduce", "gather"), "ring": ("keys",)}


@dataclasses.dataclass(frozen=True)
class Job:
    """A model, the tokens that it reads, and the devices, of which each has a part of the tokens.

    Attributes:
        config: the model's.
        chip: each device.
        topology: all of them.
        tokens: in a row.
        batch: rows.
        dtype: of weights and activations.
        gradients: whether it is trained on the tokens.
        tile: of the kernel, as for `plan.pairs`.
    """

    config: LlamaConfig
    chip: plan.Chip
    topology: cost.Topology
    tokens: int
    batch: int = 1
    dtype: str = "bfloat16"
    gradients: bool = True
    tile: int = 1

    def shapes(self, layout: str) -> Counter[cost.Shape]:
        """The attention of each layer, and of how many."""
        config, found = self.config, Counter[cost.Shape]()
        for layer in range(config.num_hidden_layers):
            window = config.window(layer)
            found[
                cost.Shape(
                    *(self.batch, self.tokens, self.tokens),
                    *(config.num_attention_heads, config.num_key_value_heads),
                    *(config.head_dim, config.value_dim, self.dtype),
                    causal=True,
                    queries_sharded=True,
                    # a window as long as the text is none
                    window=None if window is None or window >= self.tokens else (window - 1, 0),
                    layout=layout,
                )
            ] += 1
        return found

    @property
    def size(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    def weight_seconds(self) -> float:
        """Of the products with weights: two operations a weight and token, six with gradients."""
        operations = (6 if self.gradients else 2) * weights(self.config, self.dtype).used
        rows = self.batch * self.tokens / self.topology.devices
        return operations * rows / (self.chip.efficiency * self.chip.flops)

    def memory(self) -> dict[str, int]:
        """Bytes of a device beside one layer's attention, by what they are for.

        Weights are split over all devices; trained ones have a gradient, and two moments in float32. Trained, the
        input of each layer is kept for the backward, else the keys and values of each.
        """
        every = weights(self.config, self.dtype).all
        config, devices = self.config, self.topology.devices
        rows = self.batch * -(-self.tokens // devices)
        if self.gradients:
            inputs = config.num_hidden_layers * rows * config.hidden_size * self.size
            state = (2 * self.size + 8) * every // devices
            return {"weights, gradients, moments": state, "inputs of layers": inputs}
        width = config.num_key_value_heads * (config.head_dim + config.value_dim)
        cache = config.num_hidden_layers * rows * width * self.size
        return {"weights": self.size * every // devices, "keys and values": cache}


class Weights(NamedTuple):
    """Numbers of weights: all, and those that a token is multiplied by."""

    all: int
    used: int


@functools.cache
def weights(config: LlamaConfig, dtype: DTypeLike) -> Weights:
    """The weights of a decoder: of experts a token uses some, and of an embedding that is not the head a row."""
    model = jax.eval_shape(lambda key: Llama(config, dtype, key=key), jax.random.key(0))

    def count(tree: object) -> int:
        return sum(x.size for x in jax.tree.leaves(tree))

    every, idle = count(model), 0.0
    if not config.tie_word_embeddings:
        idle += count(model.embed_tokens)
    if (routed := config.experts) is not None:
        nodes = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, Experts))
        experts = sum(count(x) for x in nodes if isinstance(x, Experts))
        idle += experts * (1 - routed.num_experts_per_tok / routed.num_experts)
    return Weights(every, every - round(idle))


class Planned(NamedTuple):
    """What all layers' attention takes, by one method in one layout.

    Attributes:
        method: its name.
        merge: how it folds or what rotates, or None.
        layout: of the tokens.
        fits: whether all memory that is counted is there.
        memory: bytes of a device, by what they are for.
        sent: bytes that a device sends.
        products: seconds.
        transfers: seconds.
        exposed: seconds.
    """

    method: str
    merge: str | None
    layout: str
    fits: bool
    memory: dict[str, int]
    sent: float
    products: float
    transfers: float
    exposed: float

    @property
    def seconds(self) -> float:
        """Products, and the transfers that are exposed."""
        return self.products + self.exposed


def planned(job: Job, method: str, layout: str) -> Planned:
    """The plan of a method, with the faster of its merges; raises `ValueError` where it is none for the job."""
    shapes, topology = job.shapes(layout), job.topology
    found = []
    for merge in MERGES.get(method, (None,)):
        times = [
            plan.step_time(
                method, merge, shape, topology, job.chip, tile=job.tile, gradient=job.gradients
            )
            for shape in shapes
        ]
        products, transfers, exposed = (
            sum(layers * x[i] for layers, x in zip(shapes.values(), times, strict=True))
            for i in range(3)
        )
        sent = sum(
            layers * cost.volume(method, merge, shape, topology, gradient=job.gradients)
            for shape, layers in shapes.items()
        )
        attention = max(cost.memory(method, merge, shape, topology) for shape in shapes)
        memory = {**job.memory(), "attention of a layer": attention}
        fits = sum(memory.values()) <= job.chip.memory
        found.append(
            Planned(method, merge, layout, fits, memory, sent, products, transfers, exposed)
        )
    return min(found, key=lambda x: x.seconds)
