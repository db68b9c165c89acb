"""Sinks as keys: outcomes of a measure like the others, with a score of their own and the value zero."""

import jax.numpy as jnp

from energy_attn.kernels.internal import CallPolicy, Operands, Settings, lse_dtype, window_structure

from ..functional._free_energy import Calls, Parts, StaticCall


def sinks_as_keys(calls: Calls, parts: Parts) -> tuple[Calls, Parts]:
    """The same measure without sinks: each is a part of one key, after all other parts, in their order.

    A sink of plus infinity has the largest score that there is: all the weight, and differences of scores
    that are numbers.
    """
    plain = tuple(operands._replace(sink=None) for operands in parts)
    own = [_as_key(*x) for x in zip(calls, parts, strict=True) if x[1].sink is not None]
    return (*calls, *(call for call, _ in own)), (*plain, *(operands for _, operands in own))


def _as_key(call: StaticCall, operands: Operands) -> tuple[StaticCall, Operands]:
    """A key of zeros, whose value is zero and whose bias is the sink, for the queries that are there."""
    key, value = (jnp.zeros((len(x), 1, *x.shape[2:]), x.dtype) for x in operands[1:3])
    sink = jnp.asarray(operands.sink, lse_dtype(operands.query.dtype))
    bias = jnp.where(jnp.isposinf(sink), jnp.finfo(sink.dtype).max, sink)[..., None, None]
    bias, positions = bias if bias.ndim == 4 else bias[None], operands.query_positions
    own = Operands(operands.query, key, value, bias, None, positions, None)
    if positions is not None:
        own = own._replace(key_positions=jnp.zeros((1, 1), positions.dtype))
    own = own._replace(query_lengths=operands.query_lengths)
    # All devices have it, so that nothing is folded over them; one column of scores is dense.
    plan = None if call.plan is None else call.plan._replace(sequence=(), queries=False)
    settings = Settings(1.0, window_structure())
    return call._replace(policy=CallPolicy(("reference",)), plan=plan, settings=settings), own
