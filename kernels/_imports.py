"""Names that are imported when they are first used: the library's own, and all private names of other packages.

A module that imports its own names by `lazy` makes programs that do not use them start sooner. It imports the names
where type checkers and the documentation look, under `typing.TYPE_CHECKING`, and lists them again for `lazy`;
`tests/repository/test_public.py` compares the two.

Any version of JAX may rename or drop its private names. `private_names` looks them up before they are called, so that
a kernel declines instead of failing. A name does not tell its signature, so `dispatch/_probe.py` also lowers each
kernel once before it is used.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax


def lazy(
    module: str, *, modules: Mapping[str, str] | None = None, names: Mapping[str, str] | None = None
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` (PEP 562) of a module that imports names when they are first used.

    `module`: its `__name__`. `modules`: maps a name to the module that it stands for: `{"models": ".models"}`.
    `names`: maps any other name to the module that defines it: `{"KVCache": ".cache._cache"}`. No name may be that of
    a folder of the package, as importing the folder would bind it.
    """
    this, modules, names = sys.modules[module], modules or {}, names or {}

    def get(name: str) -> object:
        if name in modules:
            result: object = importlib.import_module(modules[name], this.__package__)
        elif name in names:
            result = getattr(importlib.import_module(names[name], this.__package__), name)
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        setattr(this, name, result)
        return result

    def list_names() -> list[str]:
        return sorted({*vars(this), *modules, *names})

    return get, list_names


_CUDNN = "jax._src.cudnn.fused_attention_stablehlo."
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"


# For each part of the library, the versions known to have its names, and our names to theirs.
_USES: dict[str, tuple[str, dict[str, str]]] = {
    # the primitives for one device, with softmax statistics in float32
    "cudnn": (
        "JAX 0.8 to 0.12",
        {
            "forward": _CUDNN + "_dot_product_attention_fwd_p",
            "backward": _CUDNN + "_dot_product_attention_bwd_p",
            "lowering": _CUDNN + "_dot_product_attention_fwd_cuda_lowering",
            "Mask": _CUDNN + "MaskType",
            "Layout": _CUDNN + "AttentionLayout",
        },
    ),
    # the versions of the installed cuDNN and CUDA runtime, which programs are compiled for
    "cuda_versions": ("JAX 0.8 to 0.12", {"versions": "jax._src.lib.cuda_versions"}),
    # the backward kernels, called with a delta that includes the cotangent of lse
    "splash": (
        "JAX 0.8 to 0.12",
        {
            "BlockSizes": _SPLASH + "kernel.BlockSizes",
            "SegmentIds": _SPLASH + "kernel.SegmentIds",
            "make": _SPLASH + "kernel.make_splash_mha",
            "backward_key": _SPLASH + "kernel._splash_attention_bwd_dkv",
            "backward_query": _SPLASH + "kernel._splash_attention_bwd_dq",
            "masks": _SPLASH + "mask",
            "check_varying": "jax._src.config._check_vma",
        },
    ),
    # its functions for one device, without its partitioning and its vmap rule
    "flash": (
        "flash-attn-jax 0.6",
        {
            "forward": "flash_attn_jax.flash_fwd._flash_mha_fwd_lowering",
            "backward": "flash_attn_jax.flash_bwd._flash_mha_bwd_lowering",
        },
    ),
    # its kernels for one device, without its primitives
    "fa4": (
        "fa4-jax 0.1",
        {"Config": "fa4_jax.attention.AttnConfig", "backend": "fa4_jax.attention.get_backend"},
    ),
    # how JAX itself detects the processes of a job
    "cluster": ("JAX 0.8 to 0.12", {"Environment": "jax._src.clusters.ClusterEnv"}),
    # the devices of the mesh in force, which JAX shows only outside of jax.jit
    "mesh": ("JAX 0.8 to 0.12", {"in_force": "jax._src.mesh.get_concrete_mesh"}),
    # whether a backend has started, after which processes cannot connect
    "devices": ("JAX 0.8 to 0.12", {"started": "jax._src.xla_bridge.backends_are_initialized"}),
}


@functools.cache
def private_names(use: str) -> Any:
    """The names of one use, as attributes under our names. Raises `NotImplementedError` where one is missing."""
    versions, names = _USES[use]
    result = {}
    for name, place in names.items():
        module, _, attribute = place.rpartition(".")
        try:
            result[name] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as reason:
            raise NotImplementedError(
                f"{use}: wanted {place}, as {versions} have it, got JAX {jax.__version__}: {reason}"
            ) from reason
    return SimpleNamespace(**result)
