"""What README.md shows runs, and what it names exists."""

import pathlib
import re

import numpy as np
import pytest

import tsfl_jax
from tests import examples

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PYTHON = (ROOT / "docs" / "python.md").read_text()


THEORY = (ROOT / "docs" / "theory.md").read_text()
# A page, the place of its Python block, and what holds of variables and output.
BLOCKS = {
    "custom rule": (
        (README, 0),
        lambda v, out: np.allclose(v["result"].history["rho"].sum(axis=1), 1),
    ),
    "simulate": (
        (README, 1),
        lambda v, out: (
            v["result"].history["rho"].shape == (20, 20)
            and v["result"].history["test_accuracy"][-1] > 0.8
            and "(64, 50)" in out
        ),
    ),
    "DMS": ((PYTHON, 0), lambda v, out: np.isclose(v["rho"].sum(), 1, rtol=1e-5)),
    "a server of NumPy": (
        (PYTHON, 1),
        lambda v, out: "fedavg [0.4" in out and "dms [" in out,
    ),
    "sweep": (
        (PYTHON, 2),
        lambda v, out: out.splitlines() in (["(6, 4)", "0.03"], ["(6, 4)", "0.1"]),
    ),
    "signs of the theory": (
        (THEORY, 0),
        lambda v, out: out.split() == ["True", "True", "1.0124", "1.0105", "1.0043"],
    ),
}


SLOW = {"sweep", "signs of the theory"}  # fast, too: test_sweep and theory/


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in BLOCKS]
)
def test_a_block_runs(name):
    (page, number), holds = BLOCKS[name]
    block = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)[number]
    assert holds(*examples.run(block))


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
