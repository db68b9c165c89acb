"""The private names of other packages that this library calls: all of them, and nowhere else.

JAX may rename or drop its own in any version. `private_names` looks for those of one use before they are
called, so that whoever asks declines instead of failing; and what kernels are made of is lowered
once before it counts as found (`_probe`), as names alone do not tell how they want to be called.
"""

import functools
import importlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

_CUDNN = "jax._src.cudnn.fused_attention_stablehlo."
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_"


class _Use(NamedTuple):
    """What one part of the library calls: the versions that have been seen to have it, our names
    and theirs.
    """

    versions: str
    names: dict[str, str]


_USES = {
    # the primitives of one device, whose statistics are in float32
    "cudnn": _Use(
        "JAX 0.8 to 0.12",
        {
            "forward": _CUDNN + "_dot_product_attention_fwd_p",
            "backward": _CUDNN + "_dot_product_attention_bwd_p",
            "lowering": _CUDNN + "_dot_product_attention_fwd_cuda_lowering",
            "Mask": _CUDNN + "MaskType",
            "Layout": _CUDNN + "AttentionLayout",
        },
    ),
    # the backward kernels, called with a delta that knows of the cotangent of lse
    "splash": _Use(
        "JAX 0.8 to 0.12",
        {
            "BlockSizes": _SPLASH + "kernel.BlockSizes",
            "make": _SPLASH + "kernel.make_splash_mha",
            "backward_key": _SPLASH + "kernel._splash_attention_bwd_dkv",
            "backward_query": _SPLASH + "kernel._splash_attention_bwd_dq",
            "masks": _SPLASH + "mask",
            "check_varying": "jax._src.config._check_vma",
        },
    ),
    # its functions for one device, with neither its partitioning nor its rule for vmap around them
    "flash": _Use(
        "flash-attn-jax 0.6",
        {
            "forward": "flash_attn_jax.flash_fwd._flash_mha_fwd_lowering",
            "backward": "flash_attn_jax.flash_bwd._flash_mha_bwd_lowering",
        },
    ),
    # primitives of which JAX may not lower one program for several sets of devices
    "lowering": _Use(
        "JAX 0.8 to 0.12",
        {"need_devices": "jax._src.dispatch.prim_requires_devices_during_lowering"},
    ),
    # what JAX itself asks for the processes of a job
    "cluster": _Use("JAX 0.8 to 0.12", {"Environment": "jax._src.clusters.ClusterEnv"}),
    # whether it is too late to connect them
    "devices": _Use("JAX 0.8 to 0.12", {"started": "jax._src.xla_bridge.backends_are_initialized"}),
}


@functools.cache
def private_names(use: str) -> Any:
    """The names of one use, as attributes under our names.

    Raises `NotImplementedError` if the version that is installed lacks one.
    """
    versions, names = _USES[use]
    found = {}
    for name, place in names.items():
        module, _, attribute = place.rpartition(".")
        try:
            found[name] = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as reason:
            raise NotImplementedError(
                f"{use}: wanted {place}, as {versions} have it, got JAX {jax.__version__}: {reason}"
            ) from reason
    return SimpleNamespace(**found)
