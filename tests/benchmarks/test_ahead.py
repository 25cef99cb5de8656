"""Programs compiled for a GPU on a machine without one: launches, kernels, memory."""

import importlib.util
import os
import subprocess
import sys

import pytest

from benchmarks import ahead, structure
from tsfl_jax.prepare import backend
from tsfl_jax.types import UserError

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="extra [aot]"
)
# Of one training step of 20 clients, batch 32: kernels, and MiB of temporary memory of
# a whole interval of 128 samples per client; measured with jax 0.10.2.
MEASURED = {"mnist_cnn": (37, 58), "fashion_cnn": (62, 257)}


def test_what_is_missing_is_asked_for(monkeypatch):
    with pytest.raises(UserError, match="GPU 'v100': expected one of a100, h100"):
        ahead.make_mesh("v100")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'tsfl_jax\[aot\]'"):
        ahead.start()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", ahead.TARGETS)
@pytest.mark.parametrize(
    ("network", "work"),
    [
        ("mnist_cnn", {}),
        ("fashion_cnn", {}),
        ("CNN", {}),  # a user's own
        ("mnist_cnn", {"algorithm": "dms"}),
        ("vgg11", {}),
        ("resnet18", {}),
    ],
)
def test_the_training_of_an_interval_is_one_command_buffer(network, target, work):
    """With the defaults on a GPU; of large networks two launches per step."""
    best = backend.implementation("gpu")
    how = {"mapping": best.mapping, "form": best.convolution}
    result = structure.compiled(network=network, target=target, **how, **work)
    s = result["structure"]
    if network in ("vgg11", "resnet18"):
        assert s["step_launches"] <= 2
        return
    assert s["launches"] <= 3 and s["step_launches"] == s["host_loops"] == 0
    if work:
        # The loops of the estimates and of training; what follows has its own.
        assert s["loop_buffers"] == 1
        return
    assert s["captured"] == s["kernels"]
    assert set(result["products"]) == {"bf16_bf16_f32_x6"}
    if network in MEASURED:
        kernels, memory = MEASURED[network]
        assert s["step_kernels"] <= 1.1 * kernels
        assert result["memory"]["temporary"] <= 1.1 * memory * 2**20


@needs_compiler
@pytest.mark.slow
def test_any_experiment_can_be_compiled_for_a_gpu():
    command = [sys.executable, "-m", "benchmarks.ahead", "digits_case3"]
    command += ["--set", "model.name=mlp"]
    env = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "on h100" in done.stdout and "in a command buffer" in done.stdout
