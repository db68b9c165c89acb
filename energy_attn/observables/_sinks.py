"""Sinks as keys: outcomes of a measure like the others, with a score of their own and the value zero."""

import jax.numpy as jnp

from energy_attn.kernels.internal import lse_dtype

from ..functional._free_energy import Arrays, Calls, Parts, Prepared


def sinks_as_keys(calls: Calls, parts: Parts) -> tuple[Calls, Parts]:
    """The same measure without sinks: each is a part of one key, after all other parts, in their order.

    A sink of plus infinity has the largest score that there is: all the weight, and differences of scores
    that are numbers.
    """
    plain = tuple(arrays._replace(sink=None) for arrays in parts)
    own = [_as_key(*x) for x in zip(calls, parts, strict=True) if x[1].sink is not None]
    return (*calls, *(call for call, _ in own)), (*plain, *(arrays for _, arrays in own))


def _as_key(call: Prepared, arrays: Arrays) -> tuple[Prepared, Arrays]:
    """A key of zeros, whose value is zero and whose bias is the sink, for the queries that are there."""
    shape = (*arrays.key.shape[:-3], 1, *arrays.key.shape[-2:])
    key = jnp.zeros(shape, arrays.key.dtype)
    value = jnp.zeros((*shape[:-1], arrays.value.shape[-1]), arrays.value.dtype)
    sink = jnp.asarray(arrays.sink, lse_dtype(arrays.query.dtype))
    bias = jnp.where(jnp.isposinf(sink), jnp.finfo(sink.dtype).max, sink)[..., None, None]
    rows = {name: arrays.options.get(name) for name in ("query_seq_lengths", "query_positions")}
    # All devices have it, so that nothing is folded over them; one column of scores is dense.
    plan = None if call.plan is None else call.plan._replace(sequence=(), queries=False)
    static = Prepared(("reference",), plan, (("scale", 1.0),), at_zero=call.at_zero)
    return static, Arrays(arrays.query, key, value, bias, None, rows)
