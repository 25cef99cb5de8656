"""Figures of runs and sweeps: lines, styles, panels and axes; never half-written."""

import itertools

import numpy as np
import pytest
from matplotlib.image import imread

from studies import paper_results
from tsfl_jax.report import bands, runs, table
from tsfl_jax.report import style as plot_style
from tsfl_jax.rules import AGGREGATORS

LABELS = {"data": "digits $x$", "algorithm": "dms", "seed": 0}


def sweep_of(points):
    """The figure of a sweep: two seeds of each point."""
    rows = [{**point, "seed": seed} for point in points for seed in range(2)]
    accuracy = np.random.default_rng(0).uniform(0.9, 1.0, (len(rows), 6))
    swept = [*rows[0]]
    dataset = table.of_sweep(swept, rows, {"test_accuracy": accuracy})
    return bands.of_sweep(swept, rows, dataset, "title")


def product(**swept):
    values = itertools.product(*swept.values())
    return [dict(zip(swept, point, strict=True)) for point in values]


def looks(figure):
    """(color, dashes) of every labeled line."""
    return {
        line.get_label(): f"{line.get_color()} {line._dash_pattern}"
        for axes in figure.axes
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


@pytest.mark.parametrize(
    "swept",
    [
        {"lr": list(np.geomspace(1e-3, 1, 12).round(6))},
        {"algorithm": ["dms", "fedavg", "fedprox", "fedasync"], "lr": [0.1, 0.2, 0.3]},
    ],
)
def test_every_line_has_a_style_of_its_own_and_accuracies_their_range(swept):
    points = product(**swept)
    figure = sweep_of(points)
    lines = looks(figure)
    assert len(lines) == len(points) == len(set(lines.values()))
    assert len(figure.legends) == 1
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    for axes in figure.axes:
        assert axes.get_legend() is None
        assert not legend.overlaps(axes.get_window_extent())
        low, high = axes.get_ylim()
        assert low >= 0 and high <= 100


def test_every_algorithm_has_a_style_that_survives_grey_print():
    styles = {name: plot_style.style_of(name, 0) for name in AGGREGATORS}
    for key in ("color", "linestyle", "marker"):
        seen = [styles[name][key] for name in paper_results.ALGORITHMS]
        assert len(set(seen)) == len(seen)
    lines = {(style["color"], style["linestyle"]) for style in styles.values()}
    names = {plot_style.name_of(name) for name in AGGREGATORS}
    assert len(lines) == len(names) == len(styles)


def history_of(intervals=12, clients=5):
    """Of one run: what `curves` reads, and τ and ρ."""
    rng, t = np.random.default_rng(0), np.arange(1.0, intervals + 1)
    tau = rng.integers(0, 9, (intervals, clients))
    return {
        "test_accuracy": 1 - np.exp(-t / 5),
        "test_loss": 2 / t,
        "train_loss": 2.1 / t,
        "tau": tau,
        "rho": np.where(tau > 3, tau, 0) / np.maximum(tau.sum(1, keepdims=True), 1),
    }


@pytest.mark.parametrize("clients", [1, 20, 1000])
def test_labels_of_participation_do_not_overlap(clients):
    history = history_of(clients=clients)
    figure = runs.participation(history["tau"], history["rho"], LABELS)
    figure.draw_without_rendering()
    boxes = [axes.yaxis.label.get_window_extent() for axes in figure.axes]
    for upper, lower in itertools.pairwise(boxes):
        assert upper.y0 > lower.y1
    assert all(figure.bbox.x0 <= b.x0 and b.y1 <= figure.bbox.y1 for b in boxes)


@pytest.mark.parametrize(("intervals", "clients"), [(1, 1), (12, 200)])
def test_pngs_have_ink_and_nothing_else_is_left(tmp_path, intervals, clients):
    runs.write_figures(tmp_path, history_of(intervals, clients), LABELS)
    assert {path.name for path in tmp_path.iterdir()} == set(runs.FIGURES)
    for name in runs.FIGURES:
        pixels = imread(tmp_path / name)[..., :3]
        assert pixels.shape[1] > 1000
        assert 0.01 < (pixels < 0.9).any(-1).mean() < 0.7


def test_curves_show_the_numbers_of_the_history():
    figure = runs.curves(history_of(), LABELS)
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


def heights_of(axes):
    return [segment[1, 1] for segment in axes.collections[0].get_segments()]


def test_participation_counts_weights_above_zero():
    tau = np.array([[2, 4, 0], [2, 8, 1]])
    rho = np.array([[0.25, 0.75, 0], [0, 1, 0]], np.float32)
    figure = runs.participation(tau, rho, LABELS)
    expected = [[50, 100, 0], [12.5, 87.5, 0], [2, 6, 0.5]]
    for axes, numbers in zip(figure.axes, expected, strict=True):
        np.testing.assert_allclose(heights_of(axes), numbers)
    np.testing.assert_allclose(figure.axes[1].lines[0].get_ydata(), 100 / 3)
