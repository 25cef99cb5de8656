"""Figures of sweeps: styles, panels, legends and axes."""

import itertools

import numpy as np
import pytest

from tsfl_jax.report import bands, statistics, table
from tsfl_jax.report import style as plot_style
from tsfl_jax.rules import AGGREGATORS

SEEDS, LENGTH = 2, 6


def sweep_of(**swept):
    """Settings, rows and table of a product, with two seeds."""
    points = [
        dict(zip(swept, values, strict=True))
        for values in itertools.product(*swept.values())
    ]
    rows = [{**point, "seed": s} for point in points for s in range(SEEDS)]
    measured = np.random.default_rng(0).uniform(0.9, 1.0, (len(rows), LENGTH))
    return arguments_of([*swept, "seed"], rows, measured)


def arguments_of(swept, rows, measured):
    """The arguments of `bands.of_sweep` but the title."""
    return swept, rows, table.of_sweep(swept, rows, {"test_accuracy": measured})


def looks(figure):
    """(color, dashes) of every labeled line."""
    return {
        line.get_label(): (
            line.get_color(),
            str(line.get_linestyle()),
            line._dash_pattern,
        )
        for axes in figure.axes
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


@pytest.mark.parametrize(
    "swept",
    [
        {"lr": [0.1, 0.2, 0.3, 0.4]},
        {"lr": list(np.geomspace(1e-3, 1, 12).round(6))},
        {"algorithm": ["dms", "fedavg", "fedprox", "fedasync"], "lr": [0.1, 0.2, 0.3]},
        {"lr": [0.1, 0.2], "mu": [0.1, 0.2], "gamma": [0.1, 0.3]},
        {"algorithm": list(AGGREGATORS)[:12]},
    ],
)
def test_every_line_has_a_style_of_its_own(swept):
    figure = bands.of_sweep(*sweep_of(**swept), "title")
    found = [str(look) for look in looks(figure).values()]
    assert len(found) == np.prod([len(v) for v in swept.values()])
    assert len(set(found)) == len(found)


def test_color_is_one_setting_and_dashes_another():
    settings = [
        {"algorithm": a, "lr": lr} for a in ("dms", "fedavg") for lr in (0.1, 0.2)
    ]
    first, second, third, fourth = plot_style.styles_of(settings)
    dms, fedavg = (plot_style.style_of(rule, 0) for rule in ("dms", "fedavg"))
    assert first["color"] == second["color"] == dms["color"]
    assert third["color"] == fourth["color"] == fedavg["color"]
    assert first["linestyle"] == third["linestyle"] != second["linestyle"]
    assert second["linestyle"] == fourth["linestyle"]


def test_settings_of_single_rules():
    """Dashes are the same in all colors, if there are enough of them for that."""
    points = [{"algorithm": "dms", "dms.coupling": c} for c in range(5)]
    points += [{"algorithm": "fedprox", "mu": c} for c in range(5)]
    looks = plot_style.styles_of(points)
    dashes = [str(look["linestyle"]) for look in looks]
    assert dashes[:5] == dashes[5:] and len({look["color"] for look in looks}) == 2


def test_lines_that_share_no_value_are_titled_with_all_settings_side_by_side():
    """Random points and points of a list: long titles are broken between settings."""
    points = [{"dms.coupling": c / 7, "mu": c / 3} for c in range(1, 6)]
    rows = [{**point, "seed": 0} for point in points]
    measured = np.full((5, LENGTH), 0.9)
    arguments = arguments_of(["dms.coupling", "mu", "seed"], rows, measured)
    figure = bands.of_sweep(*arguments, "title")
    figure.draw_without_rendering()
    titles = [axes.title for axes in figure.axes if axes.get_title()]
    assert [title.get_text() for title in titles] == [
        f"dms.coupling={c / 7}\nmu={c / 3}" for c in range(1, 6)
    ]
    boxes = [title.get_window_extent() for title in titles]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_four_lines_share_axes_and_five_have_panels():
    few = bands.of_sweep(*sweep_of(lr=[0.1, 0.2, 0.3, 0.4]), "few")
    assert len(few.axes) == 1 and len(few.axes[0].lines) == 4
    many = bands.of_sweep(*sweep_of(lr=[0.1, 0.2, 0.3, 0.4, 0.5]), "many")
    titles = [axes.get_title() for axes in many.axes if axes.get_title()]
    assert titles == [f"lr={v}" for v in (0.1, 0.2, 0.3, 0.4, 0.5)]


def test_legends_are_outside_and_accuracies_within_their_range():
    for swept in ({"lr": [0.1, 0.2]}, {"lr": [0.1, 0.2, 0.3], "mu": [0.0, 1.0]}):
        figure = bands.of_sweep(*sweep_of(**swept), "title")
        assert len(figure.legends) == 1
        figure.draw_without_rendering()
        legend = figure.legends[0].get_window_extent()
        for axes in figure.axes:
            assert axes.get_legend() is None
            assert not legend.overlaps(axes.get_window_extent())
            low, high = axes.get_ylim()
            assert low >= 0 and high <= 100


def test_frameworks_are_compared_in_panels_over_virtual_time():
    time, accuracy = np.arange(1, 11.0), np.linspace(0.1, 0.99, 10)
    labels = ["tsfl_dms", "tsfl", "sfl", "afl", "fedbuff", "fedat", "fedcs"]
    labels += ["esync", "safa"]
    curves = {name: statistics.in_time([(time, accuracy)] * 2) for name in labels}
    few, many = (
        bands.bands(dict(some), "title", x=bands.SECONDS, target=0.5)
        for some in (list(curves.items())[:3], curves)
    )
    assert len(few.axes) == 1 and len(few.legends) == 1 and len(many.axes) == 9
    for figure in (few, many):
        assert figure.axes[0].get_ylim()[1] <= 100
        assert figure.axes[0].get_lines()[-1].get_ydata()[0] == 50
    found = list(looks(many).values())
    assert len(found) == 9 and len(set(map(str, found))) == 9
