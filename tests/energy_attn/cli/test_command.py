"""`python -m energy_attn` in a process of its own, as users run it: one for several commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.flags import environment

ROOT = Path(__file__).resolve().parents[3]
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
    assert "3 × cpu" in info and "decode, blockwise, reference" in info and "declines" in info
    assert done.stdout.endswith("status 0 of info\n")
