"""``python -m studies.fleet_scale``: frameworks on small and large measured fleets.

T-SFL, SFL and FedAT with over-selection, and FedBuff ask K = 20 clients at a time of N
of `timeline.fleet`, of those that are online, on digits. All have the same data, split
and clients of each seed, and what a target costs is in virtual hours, bytes and joules.
"""

import argparse
from typing import Any

from studies import arguments, compare
from tsfl_jax.config import Config
from tsfl_jax.engine import devices
from tsfl_jax.report import files, style
from tsfl_jax.report.statistics import OVER_SEEDS, in_time, spread_of_known
from tsfl_jax.run import grid

_HOUR = 3600
SETTINGS: dict[str, Any] = {
    "num_intervals": 120,
    "batch_size": 10,
    "lr": 0.02,
    "schedule.interval_seconds": 60.0,
    "schedule.iteration": "step",
    "cohort.size": 20,
    "cohort.sampler": "online",
    "timeline.fleet": "mobile",
    "data.name": "digits",
    "partition.kind": "dirichlet",
    "partition.alpha": 0.3,
    "partition.replacement": True,
}
_TASK, _ASK = {"timeline.local_iterations": 20}, {"cohort.ask": 26}
FRAMEWORKS: dict[str, dict[str, Any]] = {
    "tsfl": {"algorithm": "fedavg"},
    "sfl": {"algorithm": "fedavg"} | _TASK | _ASK,
    "fedbuff": {"algorithm": "fedbuff", "staleness.kind": "polynomial"} | _TASK,
    "fedat": {"algorithm": "fedat"} | _TASK | _ASK,
}
Results = list[compare.FrameworkResult]


def entries(clients: int, changes: dict[str, Any]) -> list[compare.Entry]:
    """The frameworks on N clients."""
    shared = SETTINGS | changes | {"num_clients": clients}
    return [
        compare.Entry(name, grid.changed(Config(), shared | own_settings))
        for name, own_settings in (
            (name, {"timeline.framework": name} | settings)
            for name, settings in FRAMEWORKS.items()
        )
    ]


def rows(results: dict[int, Results], target: float) -> list[dict[str, str]]:
    """The table as text, a row for each N and framework."""
    percent, lines = f"{100 * target:g} %", []
    for clients, several in results.items():
        for result in several:
            hours = compare.times_of(result, target) / _HOUR
            line = {
                "N": f"{clients:,}",
                "framework": style.name_of(result.label),
                "updates": f"{result.updates:.0f}",
                "mean staleness": f"{result.staleness:.1f}",
                "best accuracy, %": compare.best_accuracy(result),
                f"h to {percent}": spread_of_known(hours, ".3f", is_time=True),
            }
            lines.append(line | compare.costs_to(result, target))
    return lines


@style.styled
def figure_of(results: dict[int, Results], target: float, title: str) -> Any:
    """Accuracy over virtual hours, a panel for each N."""
    figure, axes = style.figure_of(3.4, ncols=len(results), squeeze=False)
    for panel, (clients, several) in zip(axes[0], results.items(), strict=True):
        for result, look in zip(several, style.styles_of([*FRAMEWORKS]), strict=True):
            curves = 100 * in_time(result.curves)
            places, label = curves.index.to_numpy() / _HOUR, style.name_of(result.label)
            style.plot_mean(panel, places, curves.to_numpy().T, look, label, True)
        panel.axhline(100 * target, color="#999999", linewidth=0.8, zorder=0)
        panel.set_title(f"N = {clients:,}")
        panel.set(xscale="log", ylim=(40, 100))
        panel.set_xlabel("virtual hours")
        panel.set_ylabel("test accuracy in %")
    style.legend_below(figure, *axes[0][0].get_legend_handles_labels())
    figure.suptitle(style.title(title))
    return figure


def main(texts: list[str]) -> None:
    """Run all, write table and figure."""
    parser: argparse.ArgumentParser
    parser = arguments.make_parser("fleet_scale", __doc__, 3)
    arguments.add_settings(parser)
    text = "N, numbers of clients (default: %(default)s)"
    default = [1000, 100_000]
    parser.add_argument("--clients", type=int, nargs="+", default=default, help=text)
    text = "test accuracy to reach (default: %(default)s)"
    parser.add_argument("--target", type=arguments.SHARE, default=0.9, help=text)
    flags = arguments.parse(parser, texts)
    out = files.check_workdir(flags.out, "--out")
    devices.start(0)
    results = {}
    for clients in flags.clients:
        runs = entries(clients, flags.data_dir | flags.set)
        results[clients] = compare.run_frameworks(runs, flags.seeds, out / str(clients))
    seeds, changed = arguments.seeds_text(flags.seeds), flags.set
    data = next(iter(results.values()))[0].data
    title = arguments.joined(data, *arguments.settings_text(changed), seeds)
    table = rows(results, flags.target)
    paths = files.write_table(out, "fleet_scale", table, f"{title}; {OVER_SEEDS}.")
    figure = figure_of(results, flags.target, title)
    for path in paths + style.save_both(figure, out / "fleet_scale"):
        print(path)


if __name__ == "__main__":
    arguments.start("fleet_scale", main)
