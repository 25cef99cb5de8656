"""Plot the picture of the README: ``python docs/picture.py``, about a minute.

Left, the timelines of the same clients under SFL and T-SFL; right, test accuracy over
virtual time, the mean of five seeds: digits, 10 clients, 0.25 to 1 s per iteration.
"""

import pathlib

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import tsfl_jax
from tsfl_jax.report import gantt, statistics, style

PATH = pathlib.Path(__file__).with_suffix(".png")
SEEDS, CLIENTS, SHOWN = 5, 10, 6.0  # SHOWN: seconds of the timelines
SECONDS = (0.25, 0.3, 0.4, 0.6, 0.95)  # of an iteration, of two clients each
ENTRIES = {  # label of its style: framework and rule
    "sfl": ("sfl", "fedavg"),
    "tsfl": ("tsfl", "fedavg"),
    "tsfl_dms": ("tsfl", "dms"),
    "afl": ("afl", "fedasync"),
}


def config_of(framework: str, algorithm: str) -> tsfl_jax.Config:
    """The experiment under a framework and a rule."""
    config = tsfl_jax.Config(
        algorithm=algorithm,
        num_clients=CLIENTS,
        num_intervals=15,
        batch_size=8,
        lr=0.01,
    )
    config.schedule.data_size = 128
    config.schedule.interval_seconds = 2.0
    config.timeline.framework = framework
    config.timeline.speed = "; ".join(f"constant({x})" for x in SECONDS)
    config.timeline.download = config.timeline.upload = "constant(0.1)"
    if algorithm == "fedasync":
        config.staleness.kind = "polynomial"
    return config


def plot_timeline(axes, framework: str, name: str) -> dict[str, Patch]:
    """One framework's timeline; returns the legend's entries."""
    line = tsfl_jax.explain(config_of(framework, "fedavg")).timeline
    chart = gantt.chart_of(line, SHOWN, CLIENTS)
    gantt.plot(axes, chart, SHOWN)
    axes.set_xlim(0, SHOWN)
    axes.set_yticks([])
    axes.set_ylabel("clients")
    axes.set_title(name, loc="left", fontsize=9)
    return {v: Patch(**gantt.LOOKS[k].bar()) for k, v in chart.labels.items()}


def plot_accuracy(axes) -> None:
    """Test accuracy over virtual time, the mean over the seeds."""
    for index, (label, entry) in enumerate(ENTRIES.items()):
        history = tsfl_jax.sweep(config_of(*entry), {"seed": range(SEEDS)}).history
        curves = zip(history["virtual_time"], history["test_accuracy"], strict=True)
        # AFL does not test each of its updates.
        tested = [(at[(seen := ~np.isnan(a))], a[seen]) for at, a in curves]
        mean = 100 * statistics.in_time(tested).mean(axis=1).loc[2:30]
        look = {**style.style_of(label, index), "markersize": 4}
        every = max(1, len(mean) // 9)
        axes.plot(mean, **look, markevery=every, label=style.name_of(label))
    axes.set_xlabel("virtual time in seconds")
    axes.set_title("test accuracy in %, mean of 5 seeds", loc="left", fontsize=9)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)


def main() -> None:
    """Plot all and write the file."""
    matplotlib.rcParams.update({"font.size": 9, "hatch.linewidth": 0.5})
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplot_mosaic([["sfl", "right"], ["tsfl", "right"]])
    handles = plot_timeline(axes["sfl"], "sfl", "SFL: all wait for the slowest client")
    handles |= plot_timeline(axes["tsfl"], "tsfl", "T-SFL: an update every 2 seconds")
    axes["sfl"].set_xticklabels([])
    axes["tsfl"].set_xlabel("virtual time in seconds (lines: global updates)")
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=5, fontsize=8
    )
    plot_accuracy(axes["right"])
    figure.savefig(PATH, dpi=110)
    print(PATH.name, PATH.stat().st_size // 1024, "KB")


if __name__ == "__main__":
    main()
