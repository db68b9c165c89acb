"""`python -m energy_attn info`: which kernel it names for a call, and why."""

import pytest

from energy_attn.__main__ import main
from energy_attn.cli.info import EXAMPLES, choice
from tests.support.complaints import complaint


def test_info_explains_a_call(capsys):
    """A choice explained for another platform or other shapes than those given."""
    call = ["info", "--query", "1,1,32,128", "--key", "1,4096,8,128"]
    assert main([*call, "--platform", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "used on cpu" in out and "\n    decode_cpu\n" in out and "[1, 4096, 8, 128]" in out
    assert main(["info", "--query", "2,512,4,64", "--dtype", "float64", "--causal"]) == 0
    out = capsys.readouterr().out
    assert "\n    blockwise\n" in out and "as decode declines: query: wanted at most 64 rows" in out


def test_info_explains_a_gpu(capsys):
    """An answer for an H100, to a question about a GPU that neither cuDNN nor Triton knows."""
    call = ["info", "--platform", "cuda", "--query", "1,256,8,256", "--causal"]
    for capability, name in (("9.0", "cudnn"), ("8.0", "pallas_gpu"), ("7.5", "blockwise")):
        assert main([*call, "--capability", capability]) == 0
        out = capsys.readouterr().out
        assert f"\n    {name}\n" in out and "\n      second derivatives: blockwise\n" in out


@pytest.mark.parametrize("call", EXAMPLES, ids=lambda call: call.what)
def test_info_says_what_would_be_used(call):
    """A kernel of another platform, or one that declines the call."""
    chosen, *reasons = choice(call, "cpu")
    assert chosen == ("decode_cpu" if call.query[1] == 1 else "blockwise")
    assert reasons
    for platform, few, many in (("cuda", "pallas_gpu", "cudnn"), ("tpu", "pallas_tpu", "splash")):
        wanted = {few} if call.query[1] < 64 or call.dtype == "float32" else {few, many}
        wanted = {"blockwise"} if call.dtype == "float64" else wanted
        assert choice(call, platform)[0] in wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--capability", "9"], "wanted two numbers, as in 9.0, got '9'"),
        (["--platform", "cpu", "--capability", "9.0"], "--capability is for --platform cuda"),
        (["--query", "1,2,3"], "wanted four sizes of at least 1, got '1,2,3'"),
        (["--query", "1,2,3,x"], "wanted four sizes"),
        (["--query", "1,1,8,64", "--key", "1,9,3,64"], "a K that divides 8"),
        (["--platform", "abacus"], "invalid choice"),
    ],
)
def test_info_wrong_options(arguments, message, capsys):
    """A traceback instead of a message."""
    assert message in complaint(["info", *arguments], capsys)
