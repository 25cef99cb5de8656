"""Every benchmark runs and prints its table; slow, and without any claim on speed."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import tsfl_jax
from benchmarks import gpu, small

ROOT = pathlib.Path(__file__).parents[2]

SHORT = {
    "interval": "--models mnist_cnn --clients 2",
    "shares": "--clients 4",
    "clients": "--clients 2 4",
    "populations": "--clients 1000 --size 10",
    "compile": "--programs MNIST_CNN,_FedAvg",
    "implementations": "--models mnist_cnn --clients 2 --size 32",
    "small": "--models logistic --lanes 1 --what program",
    "wide": "--hidden 64",
    "own": "--networks transformer",
    "peers": "--workloads lr_mnist --rounds 2",
    "lanes": "--lanes 1 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_benchmark_prints_a_table(name):
    if name == "interval":
        pytest.importorskip("torch")
    words = [word.replace("_CNN,_", " CNN, ") for word in SHORT[name].split()]
    command = [sys.executable, "-m", f"benchmarks.{name}", *words, "--repeats", "1"]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) >= 3 and len({line.count("|") for line in lines}) == 1
    assert "nan" not in done.stdout


def test_a_part_that_fails_is_reported_and_the_others_go_on(tmp_path, monkeypatch):
    parts = [("Good", 60, "common"), ("Bad", 60, "nothing"), ("Slow", 0.01, "common")]
    monkeypatch.setattr(gpu, "PARTS", parts)
    out = tmp_path / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["gpu", f"--out={out}"])
    monkeypatch.chdir(ROOT)
    gpu.main()
    text = out.read_text()
    assert "## Good" in text
    assert "No module named benchmarks.nothing" in text
    assert "not measured: more than 0 s" in text


BY_HAND = [("vmap", "even"), ("map", "even"), ("vmap", "uneven"), ("loop", "uneven")]


@pytest.mark.slow
@pytest.mark.parametrize(("lanes_by", "work"), BY_HAND)
@pytest.mark.parametrize("model", ["MLP", "logistic"])
def test_the_hand_written_program_gives_our_result(model, lanes_by, work):
    data, own = small.arrays_of(small.seeds(model, 4, 2, work))
    with jax.numpy_rank_promotion("allow"):  # as in a program of a user's own
        _, (accuracy, loss) = small.hand_written(4, data, lanes_by, work)(*own)
    config = small.make_config(model, 4, work)
    history = tsfl_jax.sweep(config, {"seed": range(2)}).history
    np.testing.assert_allclose(accuracy, history["test_accuracy"], atol=1e-6)
    np.testing.assert_allclose(loss, history["test_loss"], rtol=1e-5)
