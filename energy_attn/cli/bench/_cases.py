"""The cases of the benchmark: sizes, and attention by us and by each peer on the same arrays."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

import energy_attn
from energy_attn.kernels import local_attention

from ._derivatives import DERIVATIVES, GRADIENT_OF
from ._energies import ENERGIES, flex
from ._observables import JOBS

Run = Callable[[], Any]  # starts a computation and returns its result, to be waited for
OURS, JAX_NN, CUDNN, FLASH, PYTORCH = (
    "energy_attn",
    "jax.nn",
    "jax.nn, cuDNN",
    "flash-attn-jax",
    "PyTorch",
)
BARE = "the bare kernel"
# Peers of observables: the formula over the matrix of weights, and our attention, which shows the
# cost of one pass.
DENSE, ONE_PASS = "jax.numpy", "our attention"
# The same for derivatives that are a multiple of a gradient.
ONE_GRADIENT = "our gradient"


class Sizes(NamedTuple):
    """The sizes of an attention, named as everywhere in the library."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    width: int


class Case(NamedTuple):
    """One comparison: a job, its sizes and its dtype.

    Attributes:
        name: the job: prefill, decode, forward + backward, jax.grad of F, an observable, a derivative, or an energy.
        shape: the sizes.
        dtype: of all arrays.
        backward: whether the gradients in query, key and value are computed as well.
        causal: whether later keys are hidden.
        bare: whether the peer is our own kernel called by hand, and we are `jax.grad` of F.
    """

    name: str
    shape: Sizes
    dtype: str
    backward: bool = False
    causal: bool = False
    bare: bool = False

    @property
    def key_bytes(self) -> int:
        """The bytes of keys and values."""
        shape = self.shape
        size = 2 * shape.batch * shape.keys * shape.kv_heads * shape.width
        return size * jnp.dtype(self.dtype).itemsize

    @property
    def sizes(self) -> str:
        """The lengths, in short."""
        return f"T={self.shape.queries}, S={self.shape.keys}"

    def about(self) -> dict[str, Any]:
        """The fields of the case in the results."""
        return {"dtype": self.dtype, "causal": self.causal, "shape": self.shape._asdict()}

    def shrunk(self, by: int) -> "Case":
        """The case with sequences `by` times shorter."""
        queries, keys = (max(x // by, 1) for x in (self.shape.queries, self.shape.keys))
        return self._replace(shape=self.shape._replace(queries=queries, keys=keys))

    def sides(self, platform: str) -> tuple[dict[str, Run], dict[str, str]]:
        """Our job and each peer's, ready to run; and the reasons of absent peers."""
        return _sides(self, platform)


def torch() -> Any:
    """PyTorch, or None where it is not installed."""
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def program(case: Case, attend: Callable[..., Any]) -> Any:
    """The jitted job of a case with the given attention."""

    def loss(*arrays: Array) -> Array:
        return (attend(*arrays).astype(jnp.float32) ** 2).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)) if case.backward else attend)


def shapes(case: Case) -> list[tuple[int, ...]]:
    """The shapes of query, key and value."""
    shape = case.shape
    sizes = ((shape.queries, shape.heads), *[(shape.keys, shape.kv_heads)] * 2)
    return [(shape.batch, *size, shape.width) for size in sizes]


def _sides(case: Case, platform: str) -> tuple[dict[str, Run], dict[str, str]]:
    arrays = _random(case)
    found: dict[str, Run] = {}
    absent: dict[str, str] = {}
    for name, attend in _attentions(case, platform).items():
        run = _compiled(program(case, attend), arrays)
        try:
            jax.block_until_ready(run())
        except Exception as reason:  # whatever the installation of a peer lacks
            if name == OURS:
                raise
            absent[name] = f"{type(reason).__name__}: {reason}".splitlines()[0]
        else:
            found[name] = run
    if case.bare or case.name in (*JOBS, *DERIVATIVES):
        return found, absent
    try:
        found[PYTORCH] = _pytorch(case, arrays, platform)
    except (ImportError, NotImplementedError) as reason:
        absent[PYTORCH] = str(reason)
    return found, absent


def _random(case: Case) -> list[jax.Array]:
    # drawn on the device: large arrays are not copied there
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return [
        draw(key, shape, jnp.dtype(case.dtype))
        for key, shape in zip(keys, shapes(case), strict=True)
    ]


def _compiled(run: Callable[..., Any], arrays: list[jax.Array]) -> Run:
    return lambda: run(*arrays)


def _attentions(case: Case, platform: str) -> dict[str, Callable[..., Any]]:
    def ours(q: Array, k: Array, v: Array) -> Array:
        return energy_attn.attention(q, k, v, is_causal=case.causal)

    def jax_nn(
        q: Array, k: Array, v: Array, implementation: Literal["cudnn"] | None = None
    ) -> Array:
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=case.causal, implementation=implementation
        )

    def flash(q: Array, k: Array, v: Array) -> Array:
        return importlib.import_module("flash_attn_jax").flash_mha(q, k, v, is_causal=case.causal)

    if case.name in ENERGIES:
        energy = ENERGIES[case.name]
        unit = ONE_GRADIENT if case.backward else ONE_PASS
        return {
            OURS: energy.ours,
            JAX_NN: energy.dense,
            unit: energy.beside,
        }
    if case.name in JOBS:
        job, dense = JOBS[case.name]
        return {OURS: job, DENSE: dense, ONE_PASS: ours}
    if case.name in DERIVATIVES:
        job, dense = DERIVATIVES[case.name]
        unit = (
            {ONE_GRADIENT: GRADIENT_OF[case.name]} if case.name in GRADIENT_OF else {ONE_PASS: ours}
        )
        return {OURS: job, JAX_NN: dense, **unit}
    if case.bare:

        def gradient(q: Array, k: Array, v: Array) -> Array:
            def total(source: Array) -> Array:
                return energy_attn.free_energy(q, k, v, source=source, is_causal=case.causal).sum()

            return jax.grad(total)(np.zeros(q.shape, q.dtype))

        def bare(q: Array, k: Array, v: Array) -> Array:
            return local_attention(q, k, v, is_causal=case.causal).out

        return {OURS: gradient, BARE: bare}
    if platform != "cuda":
        return {OURS: ours, JAX_NN: jax_nn}
    return {
        OURS: ours,
        CUDNN: lambda q, k, v: jax_nn(q, k, v, "cudnn"),
        FLASH: flash,
    }


def _pytorch(case: Case, arrays: list[jax.Array], platform: str) -> Run:
    """PyTorch's job on the same numbers; raises `ImportError` or `NotImplementedError` without it."""
    torch_ = torch()
    if torch_ is None:
        raise ImportError("not installed")
    on_gpu = platform == "cuda"
    if on_gpu and not torch_.cuda.is_available():
        raise ImportError("installed without CUDA")
    torch_.set_num_threads(os.cpu_count() or 1)
    dtype, device = getattr(torch_, case.dtype), "cuda" if on_gpu else "cpu"
    # the same [B, T, N, H] layout in memory, viewed in PyTorch's order of axes
    tensors = [torch_.from_dlpack(x).to(device=device, dtype=dtype).transpose(1, 2) for x in arrays]
    if case.name in ENERGIES:
        return flex(case.name, torch_, *tensors)
    grouped = {"enable_gqa": True} if case.shape.heads != case.shape.kv_heads else {}

    def attend(*tensors: object) -> Any:
        return torch_.nn.functional.scaled_dot_product_attention(
            *tensors, is_causal=case.causal, **grouped
        )

    def forward() -> Any:
        with torch_.no_grad():
            return attend(*tensors)

    def forward_and_backward() -> Any:
        leaves = [x.detach().requires_grad_() for x in tensors]
        (attend(*leaves).float() ** 2).sum().backward()
        return [x.grad for x in leaves]

    return forward_and_backward if case.backward else forward


def wait(result: PyTree) -> None:
    """Waits for a result of JAX or PyTorch."""
    leaves = jax.tree.leaves(result)
    if isinstance(leaves[0], jax.Array):
        jax.block_until_ready(leaves)
    elif leaves[0].is_cuda:
        torch().cuda.synchronize()


def numbers(result: PyTree) -> list[np.ndarray]:
    """The arrays of a result in float32, in our layout."""
    leaves = jax.tree.leaves(result)
    if isinstance(leaves[0], jax.Array):
        return [np.asarray(x.astype(jnp.float32)) for x in leaves]
    return [x.detach().transpose(1, 2).float().cpu().numpy() for x in leaves]
