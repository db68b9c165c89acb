"""Wrong input, and checks of the errors that it raises."""

import builtins

import numpy as np
import pytest
from hypothesis import strategies as st

from energy_attn.__main__ import main
from energy_attn.kernels import AttentionState
from tests.support.arrays import array


def a(*shape, dtype="float32"):
    return array(np.ones(shape), dtype)


NAN, INF = float("nan"), float("inf")
B, T, N, H = 2, 3, 4, 5
S, K, V = 7, 2, 6
STATE = AttentionState(a(2, 3), a(2))


def complains(call, error, name, received, wanted):
    """Checks that `call` raises `error` itself, whose message reads "name: wanted ..., got ..."."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert message.startswith(f"{name}: wanted "), message
    before, _, after = message.partition("got ")
    assert wanted in before and received in after, message


def complaining(rows, *fixtures):
    """A test that calls complain: by name, a call, its error, the argument, what it got and what was wanted."""

    @pytest.mark.usefixtures("unchecked", *fixtures)
    @pytest.mark.parametrize("what", rows)
    def test(what):
        complains(*rows[what])

    return test


# Anything at all in the place of one argument.
DTYPES = "float32", "bfloat16", "int32", "uint8", "bool", "complex64"
SHAPES = st.lists(st.integers(0, 7), max_size=5).map(tuple) | st.sampled_from(
    [(B, T, N, H), (B, S, K, H), (B, S, K, V), (B, N, T, S), (1, 1, 1, S), (B, T), (B, S), (B,)]
)


@st.composite
def arrays(draw):
    shape, dtype = draw(SHAPES), draw(st.sampled_from(DTYPES))
    return (
        np.ones(shape, dtype)
        if draw(st.booleans()) and dtype != "bfloat16"
        else a(*shape, dtype=dtype)
    )


ANYTHING = (
    arrays()
    | st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats(-1e3, 1e3)
    | st.sampled_from([NAN, INF, 1j, np.float16(0.5), np.int64(3), (), [], {}, {1, 2}])
    | st.sampled_from(["", "tree", "f2", "node", print, int, object(), STATE, (1, 2), (1, [2])])
    | st.lists(st.integers(-1, 3) | st.text(max_size=2) | st.floats(0, 1), max_size=3)
)


def outcome(function, names, arguments):
    """Returns the function's result; None if it raises a TypeError or ValueError that names an argument."""
    try:
        return function(**arguments)
    except (TypeError, ValueError) as wrong:
        message = str(wrong)
        assert type(wrong) in (TypeError, ValueError), message
        assert message.partition(":")[0].partition(".")[0] in names, message
        assert "wanted " in message and "got " in message, message
        return None


def refused(wanted):
    """Expects an error: `wanted` is the name of its class and a pattern of its message."""
    kind, _, message = wanted.partition(" ")
    return pytest.raises(getattr(builtins, kind), match=message)


def complaint(arguments, capsys):
    """What the command says on standard error, whose status is 2 for these arguments."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    return capsys.readouterr().err
