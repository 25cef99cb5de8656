"""Every benchmark runs and prints its table; slow, and without any claim on speed."""

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import tsfl_jax
from benchmarks import gpu, profile, small

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


def run_gpu(monkeypatch, out, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu", f"--out={out}", *arguments])
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(out / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.chdir(ROOT)
    gpu.main()


def test_a_part_that_fails_is_reported_and_is_the_only_one_to_run_again(
    tmp_path, monkeypatch, capsys
):
    parts = [("good", 60, "common"), ("bad", 60, "nothing"), ("slow", 0.01, "common")]
    monkeypatch.setattr(gpu, "PARTS", parts)
    run_gpu(monkeypatch, tmp_path)
    assert (tmp_path / "good.md").exists()
    assert "No module named benchmarks.nothing" in (tmp_path / "bad.failed").read_text()
    assert "not measured: more than 0 s" in (tmp_path / "slow.failed").read_text()
    capsys.readouterr()
    monkeypatch.setattr(gpu, "PARTS", [*parts[:2], ("slow", 60, "common")])
    run_gpu(monkeypatch, tmp_path)
    assert "good" not in capsys.readouterr().out
    assert (tmp_path / "slow.md").exists() and not (tmp_path / "slow.failed").exists()


@pytest.mark.slow
@pytest.mark.parametrize("part", [name for name, _, _ in gpu.PARTS])
def test_every_part_of_the_measurements_on_a_gpu_runs(part, tmp_path, monkeypatch):
    if part == "interval":
        pytest.importorskip("torch")
    run_gpu(monkeypatch, tmp_path, "--tiny", "--parts", part)
    lines = (tmp_path / f"{part}.md").read_text().splitlines()
    assert len([line for line in lines if line.startswith("|")]) >= 3


def test_own_times_leave_out_what_an_event_holds():
    events = [
        ("op", 1, 3),
        ("loop", 0, 10),
        ("op", 5, 4),
        ("part", 6, 1),
        ("op", 10, 2),
    ]
    assert profile.own_times(events) == [
        ("loop", 3),
        ("op", 3),
        ("op", 3),
        ("part", 1),
        ("op", 2),
    ]


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
