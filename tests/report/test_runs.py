"""Figures: made from files alone, for every kind of run, and never half-written."""

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.image import imread

from tsfl_jax.report import files
from tsfl_jax.report import runs as plots
from tsfl_jax.report import style as plot_style
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.studies import paper_results
from tsfl_jax.types import UserError


def _workdir(
    folder,
    intervals=12,
    clients=5,
    *,
    accuracy=None,
    evaluated=True,
    algorithm="dms",
    seed=0,
):
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    t = np.arange(1, intervals + 1)
    accuracy = 1 - np.exp(-t / 5) if accuracy is None else np.full(intervals, accuracy)
    rows = [
        {
            "interval": int(n),
            "test_accuracy": a,
            "test_loss": float(2 / n) if evaluated else np.nan,
            "train_loss": float(2.1 / n),
        }
        for n, a in zip(t, accuracy, strict=True)
    ]
    files.write_metrics(folder / "metrics.jsonl", rows)
    tau = rng.integers(0, 9, (intervals, clients))
    rho = np.where(tau > 3, tau, 0) / np.maximum(tau.sum(1, keepdims=True), 1)
    arrays = {"tau": tau, "size": tau + 1, "rho": rho, "selected": rho > 0}
    files.write_arrays(folder / "clients.npz", arrays, compress=True)
    about = {"data": "synthetic digits", "algorithm": algorithm, "seed": seed}
    files.write_json(folder / "summary.json", about)
    return folder


def _captured(monkeypatch):
    """The figures that are saved, instead of PNG files."""
    figures = []
    monkeypatch.setattr(
        plots.plot_style, "save", lambda figure, path: figures.append(figure)
    )
    return figures


@pytest.mark.parametrize("clients", [1, 3, 200])
@pytest.mark.parametrize("intervals", [1, 12])
def test_pngs_have_ink_and_nothing_else_is_left(tmp_path, intervals, clients):
    folder = _workdir(tmp_path, intervals, clients)
    before = {path.name for path in folder.iterdir()}
    for plot, name in (
        (plots.plot_curves, "curves"),
        (plots.plot_participation, "participation"),
    ):
        path = plot(folder)
        assert path == folder / f"{name}.png"
        pixels = imread(path)[..., :3]
        assert pixels.shape[1] > 1000
        assert 0.01 < (pixels < 0.9).any(-1).mean() < 0.7
    after = {path.name for path in folder.iterdir()}
    assert after - before == {"curves.png", "participation.png"}


def test_curves_show_the_numbers_of_the_file(tmp_path, monkeypatch):
    figures = _captured(monkeypatch)
    plots.plot_curves(_workdir(tmp_path))
    left, right = figures[0].axes
    (line,) = left.lines
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 13))
    expected = 100 * (1 - np.exp(-np.arange(1, 13) / 5))
    np.testing.assert_allclose(line.get_ydata(), expected)
    train, test = right.lines
    np.testing.assert_allclose(train.get_ydata()[[0, 1]], [2.1, 1.05])
    np.testing.assert_allclose(test.get_ydata()[[0, 1]], [2, 1])
    assert figures[0].get_suptitle() == "synthetic digits, DMS, seed 0"
    assert left.get_xlabel() == right.get_xlabel() == "interval"
    assert left.get_ylabel() == "test accuracy in %"


def test_curves_bridge_missing_values_and_an_incomplete_last_line(
    tmp_path, monkeypatch
):
    figures = _captured(monkeypatch)
    lines = [
        '{"interval": 1, "test_accuracy": null, "train_loss": 3.0}\n',
        '{"interval": 2, "test_accuracy": 0.5}\n',
        '{"interval": 3, "test_accuracy": null, "train_loss": null}\n',
        '{"interval": 4, "test_accuracy": 0.75}\n',
        '{"interval": 5, "test_acc',
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    plots.plot_curves(tmp_path)
    left, right = figures[0].axes
    np.testing.assert_array_equal(left.lines[0].get_xdata(), [2, 4])
    np.testing.assert_array_equal(left.lines[0].get_ydata(), [50, 75])
    (train,) = right.lines
    np.testing.assert_array_equal(train.get_ydata(), [3])


def test_a_run_without_evaluation_has_no_curve(tmp_path, monkeypatch):
    figures = _captured(monkeypatch)
    plots.plot_curves(_workdir(tmp_path, accuracy=np.nan, evaluated=False))
    left, _ = figures[0].axes
    assert [text.get_text() for text in left.texts] == ["not evaluated"]
    assert not left.lines


def test_a_regression_has_losses_alone(tmp_path, monkeypatch):
    figures = _captured(monkeypatch)
    plots.plot_curves(_workdir(tmp_path, accuracy=np.nan))
    (axes,) = figures[0].axes
    assert axes.get_ylabel() == "loss"
    assert len(axes.lines) == 2


def test_the_title_falls_back_on_the_config(tmp_path, monkeypatch):
    figures = _captured(monkeypatch)
    (_workdir(tmp_path) / "summary.json").unlink()
    config = {"algorithm": "fedprox", "seed": 7, "data": {"name": "own $x$"}}
    files.write_json(tmp_path / "config.json", config)
    plots.plot_curves(tmp_path)
    assert figures[0].get_suptitle() == r"own \$x\$, FedProx, seed 7"


def test_participation_counts_weights_above_zero(tmp_path, monkeypatch):
    figures = _captured(monkeypatch)
    tau = np.array([[2, 4, 0], [2, 8, 1]])
    rho = np.array([[0.25, 0.75, 0], [0, 1, 0]], np.float32)
    files.write_arrays(tmp_path / "clients.npz", {"tau": tau, "rho": rho})
    plots.plot_participation(tmp_path)
    measured = [[50, 100, 0], [12.5, 87.5, 0], [2, 6, 0.5]]
    for axes, wanted in zip(figures[0].axes, measured, strict=True):
        heights = [segment[1, 1] for segment in axes.collections[0].get_segments()]
        np.testing.assert_allclose(heights, wanted)
    np.testing.assert_allclose(figures[0].axes[1].lines[0].get_ydata(), 100 / 3)


def test_many_clients_are_in_order_of_tau(tmp_path, monkeypatch):
    figures = _captured(monkeypatch)
    plots.plot_participation(_workdir(tmp_path, clients=2000))
    last = figures[0].axes[2]
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
    path = plots.plot_curves(_workdir(tmp_path))
    old = path.read_bytes()

    def full_disk(self, file, **kwargs):
        file.write(b"half a")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", full_disk)
    with pytest.raises(UserError, match="No space left"):
        plots.plot_curves(tmp_path)
    assert path.read_bytes() == old
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("content", [None, b"not a zip", b"PK\x03\x04cut"])
def test_broken_files_are_reported_in_one_line(tmp_path, content):
    if content is not None:
        for name in ("metrics.jsonl", "clients.npz"):
            (tmp_path / name).write_bytes(content + b"\n")
    for plot, name in (
        (plots.plot_curves, "metrics"),
        (plots.plot_participation, "clients"),
    ):
        with pytest.raises(UserError, match=name) as caught:
            plot(tmp_path)
        assert "\n" not in str(caught.value)
