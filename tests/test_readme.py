"""What README.md shows runs, and what it names exists."""

import contextlib
import io
import pathlib
import re

import numpy as np

import tsfl_jax

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = (ROOT / "docs" / "python.md").read_text()


def run_block(number, text=README):
    """Runs a Python block of the README; returns its variables and its output."""
    block = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)[number]
    variables, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(block, variables)
    return variables, out.getvalue()


def test_own_rule_example():
    result = run_block(0)[0]["result"]
    np.testing.assert_allclose(result.history["rho"].sum(axis=1), 1, rtol=1e-5)


def test_simulate_example():
    variables, out = run_block(1)
    result = variables["result"]
    assert result.history["test_accuracy"].shape == (20,)
    assert result.history["rho"].shape == (20, 20)
    assert result.history["test_accuracy"][-1] > 0.8
    assert "(64, 50)" in out


def test_dms_example():
    rho = run_block(0, PYTHON)[0]["rho"]
    np.testing.assert_allclose(rho.sum(), 1, rtol=1e-5)


def test_a_server_of_numpy():
    """ρ of two rules, and the models' mean by it."""
    _, out = run_block(1, PYTHON)
    assert "fedavg [0.4" in out and "dms [" in out


def test_sweep_example():
    _, out = run_block(2, PYTHON)
    shape, rate = out.splitlines()
    assert shape == "(6, 4)" and rate in ("0.03", "0.1")


def test_the_sign_check_of_the_theory():
    _, out = run_block(0, (ROOT / "docs" / "theory.md").read_text())
    assert out.splitlines() == ["True", "True", "1.0124 1.0105 1.0043"]


def test_named_files_and_functions_exist():
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (ROOT / path).exists(), path
    named = re.findall(r"[\w/]+\.py\b", README)
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
    (names,) = re.findall(r"Its steps are public too: (.*)\.", PYTHON)
    parts = re.findall(r"`dms\.(\w+)`", names)
    assert len(parts) == 5 and all(hasattr(tsfl_jax.dms, part) for part in parts)
