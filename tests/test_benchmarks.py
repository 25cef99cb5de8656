"""Every benchmark runs and prints its table; slow, and without any claim on speed."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

SHORT = {
    "interval": ["--models", "mnist_cnn", "--clients", "2", "--repeats", "1"],
    "shares": ["--clients", "4", "--repeats", "1"],
    "clients": ["--clients", "2", "4", "--repeats", "1"],
    "compile": ["--repeats", "1", "--programs", "MNIST CNN, FedAvg"],
    "formulations": [
        *("--models", "mnist_cnn", "--clients", "2"),
        *("--size", "32", "--repeats", "1"),
    ],
    "lanes": ["--lanes", "1", "2", "--repeats", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_benchmark_prints_a_table(name):
    if name == "interval":
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *SHORT[name]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) >= 3 and len({line.count("|") for line in lines}) == 1
    assert "nan" not in done.stdout
