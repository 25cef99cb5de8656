"""Programs compiled for a GPU on a machine without one: launches, kernels, memory."""

import importlib.util
import os
import subprocess
import sys

import pytest

from benchmarks import ahead, structure
from tsfl_jax.config import Config
from tsfl_jax.experiment import backend
from tsfl_jax.types import UserError

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="extra [aot]"
)
# Of one training step of 20 clients, batch 32: kernels, and MiB of temporary memory of
# a whole interval of 128 samples per client; measured with jax 0.10.2.
MEASURED = {
    ("mnist_cnn", "h100"): (46, 107),
    ("mnist_cnn", "a100"): (46, 107),
    ("fashion_cnn", "h100"): (85, 322),
    ("fashion_cnn", "a100"): (85, 322),
}


def test_both_gpus_are_described():
    assert ahead.TARGETS == ("a100", "h100")
    with pytest.raises(UserError, match="GPU 'v100': expected one of a100, h100"):
        ahead.make_mesh("v100")


def test_the_compiler_for_gpus_is_asked_for(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'tsfl_jax\[aot\]'"):
        ahead.start()


def compiled(network, **work):
    """One interval with the defaults on a GPU."""
    best = backend.implementation(Config(), "gpu")
    return structure.compiled(
        network=network, mapping=best.mapping, form=best.convolution, **work
    )


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("network, target", list(MEASURED))
def test_the_training_of_an_interval_is_one_command_buffer(network, target):
    found = compiled(network, target=target)
    kernels, memory = MEASURED[network, target]
    s = found["structure"]
    assert s["launches"] <= 3
    assert s["step_launches"] == s["host_loops"] == 0
    assert s["captured"] == s["kernels"]
    assert s["step_kernels"] <= 1.1 * kernels
    assert found["memory"]["temporary"] <= 1.1 * memory * 2**20


@needs_compiler
@pytest.mark.slow
def test_the_training_of_a_user_s_own_network_is_one_command_buffer():
    s = compiled("CNN")["structure"]
    assert s["launches"] <= 3
    assert s["step_launches"] == s["host_loops"] == 0
    assert s["captured"] == s["kernels"]


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("network, target", list(MEASURED))
def test_the_estimates_of_dms_are_in_the_same_command_buffer(network, target):
    s = compiled(network, target=target, algorithm="dms")["structure"]
    # The loops of the estimates and of training; what follows evaluation has its own.
    assert s["launches"] <= 3 and s["loop_buffers"] == 1
    assert s["step_launches"] == s["host_loops"] == 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("network", ["vgg11", "resnet18"])
def test_large_networks_need_at_most_two_launches_per_step(network):
    s = compiled(network)["structure"]
    assert s["step_launches"] <= 2


@needs_compiler
@pytest.mark.slow
def test_any_experiment_can_be_compiled_for_a_gpu():
    command = [sys.executable, "-m", "benchmarks.ahead", "digits_case3"]
    done = subprocess.run(
        [*command, "--set", "model.name=mlp"],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr
    assert "on h100" in done.stdout
    assert "in a command buffer" in done.stdout
