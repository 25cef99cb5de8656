"""Figures of runs, for every kind of run, and never half-written."""

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.image import imread

from tsfl_jax.report import runs as plots
from tsfl_jax.report import style as plot_style
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.studies import paper_results
from tsfl_jax.types import UserError

ABOUT = {"data": "digits $x$", "algorithm": "dms", "seed": 0}


def _history(intervals=12, clients=5, *, accuracy=None, evaluated=True):
    """Of one run: what `curves` reads, and τ and ρ."""
    rng, t = np.random.default_rng(0), np.arange(1.0, intervals + 1)
    tau = rng.integers(0, 9, (intervals, clients))
    return {
        "test_accuracy": 1 - np.exp(-t / 5) if accuracy is None else accuracy + 0 * t,
        "test_loss": 2 / t if evaluated else np.nan * t,
        "train_loss": 2.1 / t,
        "tau": tau,
        "rho": np.where(tau > 3, tau, 0) / np.maximum(tau.sum(1, keepdims=True), 1),
    }


@pytest.mark.parametrize("clients", [1, 3, 200])
@pytest.mark.parametrize("intervals", [1, 12])
def test_pngs_have_ink_and_nothing_else_is_left(tmp_path, intervals, clients):
    history = _history(intervals, clients)
    bars = plots.participation(history["tau"], history["rho"], ABOUT)
    for figure in (plots.curves(history, ABOUT), bars):
        path = plot_style.save(figure, tmp_path / "figure.png")
        pixels = imread(path)[..., :3]
        assert pixels.shape[1] > 1000
        assert 0.01 < (pixels < 0.9).any(-1).mean() < 0.7
    assert list(tmp_path.iterdir()) == [path]


def test_curves_show_the_numbers_of_the_history():
    figure = plots.curves(_history(), ABOUT)
    left, right = figure.axes
    (line,) = left.lines
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 13))
    expected = 100 * (1 - np.exp(-np.arange(1, 13) / 5))
    np.testing.assert_allclose(line.get_ydata(), expected)
    train, test = right.lines
    np.testing.assert_allclose(train.get_ydata()[[0, 1]], [2.1, 1.05])
    np.testing.assert_allclose(test.get_ydata()[[0, 1]], [2, 1])
    assert figure.get_suptitle() == r"digits \$x\$, DMS, seed 0"
    assert left.get_xlabel() == right.get_xlabel() == "interval"
    assert left.get_ylabel() == "test accuracy in %"


def test_curves_bridge_missing_values():
    nan = np.nan
    history = {
        "test_accuracy": np.array([nan, 0.5, nan, 0.75]),
        "train_loss": np.array([3.0, nan, np.inf, nan]),
    }
    left, right = plots.curves(history, {}).axes
    np.testing.assert_array_equal(left.lines[0].get_xdata(), [2, 4])
    np.testing.assert_array_equal(left.lines[0].get_ydata(), [50, 75])
    (train,) = right.lines
    np.testing.assert_array_equal(train.get_ydata(), [3])


def test_a_run_without_evaluation_has_no_curve():
    left, _ = plots.curves(_history(accuracy=np.nan, evaluated=False), ABOUT).axes
    assert [text.get_text() for text in left.texts] == ["not evaluated"]
    assert not left.lines


def test_a_regression_has_losses_alone():
    (axes,) = plots.curves(_history(accuracy=np.nan), ABOUT).axes
    assert axes.get_ylabel() == "loss"
    assert len(axes.lines) == 2


def test_participation_counts_weights_above_zero():
    tau = np.array([[2, 4, 0], [2, 8, 1]])
    rho = np.array([[0.25, 0.75, 0], [0, 1, 0]], np.float32)
    figure = plots.participation(tau, rho, ABOUT)
    measured = [[50, 100, 0], [12.5, 87.5, 0], [2, 6, 0.5]]
    for axes, wanted in zip(figure.axes, measured, strict=True):
        heights = [segment[1, 1] for segment in axes.collections[0].get_segments()]
        np.testing.assert_allclose(heights, wanted)
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), 100 / 3)


def test_many_clients_are_in_order_of_tau():
    history = _history(clients=2000)
    last = plots.participation(history["tau"], history["rho"], ABOUT).axes[2]
    heights = [segment[1, 1] for segment in last.collections[0].get_segments()]
    assert len(heights) == 2000 and (np.diff(heights) >= 0).all()
    assert "τ" in last.get_xlabel()


def test_every_algorithm_has_a_style_that_survives_grey_print():
    styles = {name: plot_style.style_of(name, 0) for name in AGGREGATORS}
    for key in ("color", "linestyle", "marker"):
        seen = [styles[name][key] for name in paper_results.ALGORITHMS]
        assert len(set(seen)) == len(seen)
    lines = [(style["color"], style["linestyle"]) for style in styles.values()]
    assert len(set(lines)) == len(styles)
    names = [plot_style.name_of(name) for name in AGGREGATORS]
    assert len(set(names)) == len(names)


def test_a_failed_save_keeps_the_old_figure(tmp_path, monkeypatch):
    figure, path = plots.curves(_history(), ABOUT), tmp_path / "curves.png"
    old = plot_style.save(figure, path).read_bytes()

    def full_disk(self, file, **kwargs):
        file.write(b"half a")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", full_disk)
    with pytest.raises(UserError, match="No space left"):
        plot_style.save(figure, path)
    assert path.read_bytes() == old
    assert not list(tmp_path.glob(".*"))
