"""`python -m energy_attn` itself: in a process of its own, as users run it, and its options."""

import os
import subprocess
import sys

import jax
import pytest

import energy_attn as ea
from energy_attn.__main__ import main
from energy_attn.cli import _command
from tests.support.complaints import complaint
from tests.support.flags import ROOT, environment, run_module

# Three commands where packages are missing that only an installation brings, and the user has asked for three devices.
COMMANDS = """
import importlib.abc, importlib.metadata, runpy, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in ("safetensors", "tokenizers", "matplotlib", "torch", "transformers", "beartype"):
            raise ModuleNotFoundError(name)

installed = importlib.metadata.distribution
def distribution(name):
    if name == "energy_attn":
        raise importlib.metadata.PackageNotFoundError(name)
    return installed(name)

importlib.metadata.distribution = distribution
sys.meta_path.insert(0, Missing())

def run(module, *arguments):
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("status", end.code, "of", *arguments, flush=True)

run("benchmarks.first_light", "--help")
run("energy_attn", "demo")
run("energy_attn", "info")
"""


@pytest.mark.smoke
def test_a_bare_checkout():
    """A package that only an installation brings; devices that the user asked for, and did not get."""
    env = environment() | {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    env.pop("JAX_ENABLE_X64", None)
    command = [sys.executable, "-c", COMMANDS]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    said, demo, info = done.stdout.split("status ")[:3]
    assert "--dry-run" in said
    assert demo.startswith("0 of --help")
    assert info.startswith("2 of demo")
    assert "wanted 8 devices, real or simulated, got 3" in done.stderr
    assert "3 × cpu" in info and "decode, blockwise" in info and "declines" in info
    assert done.stdout.endswith("status 0 of info\n")


@pytest.mark.full
def test_an_encoding_without_letters():
    """An encoding that lacks letters: a traceback."""
    assert "1 \\xd7 cpu" in run_module("info", PYTHONIOENCODING="ascii").stdout


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["demo", "--tokens", "x"], ["demo", "--tokens", "9" * 20]], ids=str
)
def test_bad_commands(arguments, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    assert "usage: python -m energy_attn" in complaint(arguments, capsys)


def test_no_command(capsys):
    """An error where a user asks what there is."""
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n    {name} " in said for name in ("info", "demo", "generate"))
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said == f"energy_attn {ea.__version__}, jax {jax.__version__}\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "--xla_force_host_platform_device_count=8"),
        ("--a=1", "--a=1 --xla_force_host_platform_device_count=8"),
        ("--xla_force_host_platform_device_count=2", "--xla_force_host_platform_device_count=2"),
    ],
)
def test_flags(before, after, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if before:
        monkeypatch.setenv("XLA_FLAGS", before)
    _command.simulate_devices()
    assert os.environ["XLA_FLAGS"] == after
    monkeypatch.undo()
