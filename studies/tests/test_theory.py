"""What the theory says of a finished run, from its files."""

import csv

import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from studies import theory
from tests.problems import small
from tsfl_jax.report import files
from tsfl_jax.rules import dms
from tsfl_jax.theory import bounds

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished run that has measured its clients."""
    workdir = tmp_path_factory.mktemp("run")
    config = small(num_intervals=3, measure_clients=True, momentum=0.0, lr=0.003)
    config.checkpoint = False
    tsfl_jax.simulate(config, workdir=workdir)
    return workdir


def test_what_is_read_is_what_was_measured(folder):
    run = theory.read_run(folder)
    rows = files.read_metrics(folder / "metrics.jsonl")
    assert run.smoothness.tolist() == [row["smoothness"] for row in rows]
    assert run.interval.tolist() == [1, 2, 3]
    assert run.weight_limit == np.inf
    assert any("pass" in note for note in run.notes)
    assert not any("momentum" in note for note in run.notes)
    known = theory.constants_of(run)
    assert known.smoothness == pytest.approx(run.smoothness.max())
    first = max(run.grad_square[0], 0) / run.smoothness[0] ** 2
    assert known.distance == pytest.approx(first)
    assert (np.asarray(known.dissimilarity) >= 0).all()
    # The tightest θ for the weights in use, and no bound without Definition 1.3.
    most = max(1.0, run.tau.shape[1] * run.rho.max())
    least = 1 / (run.lr * run.smoothness.max()) - 1
    assert known.weight_limit == pytest.approx(max(most, least), rel=1e-5)


def test_items_after_each_interval_are_those_of_the_intervals_so_far(folder):
    run = theory.read_run(folder)
    found = theory.items(run)
    for t in range(3):
        tau, rho = (jnp.asarray(a[: t + 1]) for a in (run.tau, run.rho))
        bound = bounds.theorem1_bound(rho, tau, theory.constants_of(run))
        terms = bounds.theorem1_terms(rho, tau, theory.constants_of(run))
        for mine, other in zip(found.bound, bound, strict=True):
            np.testing.assert_allclose(mine[t], other, rtol=1e-5)
        for mine, other in zip(found.terms, terms, strict=True):
            np.testing.assert_allclose(mine[t], other, rtol=1e-5)


def test_weights_side_by_side(folder):
    run = theory.read_run(folder)
    found = theory.weights(run)
    here = run.tau > 0
    np.testing.assert_array_equal(found.rho[theory.RUN], run.rho)
    for name in (theory.COROLLARY, theory.EQUAL, theory.DMS):
        np.testing.assert_allclose(found.rho[name].sum(1), 1, rtol=1e-5)
    share = here / here.sum(1, keepdims=True)
    slope = dms.coupling(
        run.tau[0],
        lr=run.lr,
        smoothness=run.smoothness[0],
        grad_sq_norm=run.grad_sq_norm[0],
        grad_variance=np.nansum(share[0] * np.nan_to_num(run.variance[0])),
    )
    weights = dms.affine_weights(run.tau[0], here[0], slope, run.weight_limit)
    mine = found.rho[theory.COROLLARY][0]
    np.testing.assert_allclose(mine, weights, atol=1e-5)
    # No bound is below the minimizer's, where there is one.
    assert found.valid.any()
    least = found.bound[theory.MINIMUM]
    for name, bound in found.bound.items():
        there = found.valid & np.isfinite(bound)
        assert there.any() or name == theory.PRINTED
        assert (bound[there] >= least[there] * (1 - 1e-5)).all(), name
    assert (found.residual[found.valid] < 1e-4).all()


def test_files(folder, tmp_path, capsys):
    theory.main([str(folder), "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for name in ("theory.md", "theory.csv", "theory_items.csv", "theory.png"):
        assert (tmp_path / name).stat().st_size and str(tmp_path / name) in printed
    text = (tmp_path / "theory.md").read_text()
    assert "η = 0.003" in text and theory.PRINTED in text and "nan" not in text
    with open(tmp_path / "theory_items.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["interval"] for row in rows] == ["1", "2", "3"]
    assert float(rows[2]["X"]) > float(rows[0]["X"]) > 0
    with open(tmp_path / "theory.csv") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[2:] == list(theory.NAMES)
