"""Train one experiment, many with --sweep, or describe them with --explain."""

import argparse
import contextlib
import pathlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from tsfl_jax import command, config_files, registry
from tsfl_jax.config import SETTINGS, Config, replace, suggestion, validate, value
from tsfl_jax.engine import devices
from tsfl_jax.report import files as report
from tsfl_jax.report import progress, style, writers
from tsfl_jax.run import explain, grid, runner, shards, sweeps
from tsfl_jax.types import UserError, nearest

Flags = argparse.Namespace

_EPILOG = """\
Any setting can be changed with --config.NAME=VALUE, such as --config.lr=0.01:
tsfl settings lists them, tsfl settings data those of one section. The experiments that
--config knows by name are listed by tsfl configs."""


def _make_parser(name: str) -> argparse.ArgumentParser:
    """The flags of all commands that train or explain, and one for each setting."""
    parser = command.make_parser("", __doc__)
    parser.prog, parser.epilog, add = name, _EPILOG, parser.add_argument
    text = "experiment, by name or file (default: %(default)s)"
    add("--config", metavar="NAME", default="digits_case3", help=text)
    text = "results (default: a new folder under runs/); the same one resumes"
    add("--workdir", metavar="FOLDER", default="", help=text)
    text = "values of a setting: seed=0:10, lr=0.01,0.1, lr=log(1e-3,1e-1,5), lin(…), "
    text += "0.1:0.5:0.1; repeatable, all combinations are run"
    add("--sweep", metavar="NAME=VALUES", action="append", default=[], help=text)
    text = "points of a sweep: a list in YAML or JSON, or a CSV table"
    add("--sweep_file", metavar="FILE", default="", help=text)
    text = "sweep: runs of one compiled call; 0 chooses"
    add("--runs_per_call", metavar="L", type=int, default=0, help=text)
    text = "sweep: run shard i of n, from 0, in a --workdir that all shards share"
    add("--shard", metavar="I/N", default="", help=text)
    text = "sweep: write the tables of what shards have finished, and train nothing"
    add("--collect", action="store_true", help=text)
    text = "sweep: run on the workers of a Ray cluster, by default one on this machine"
    add("--ray", metavar="ADDRESS", nargs="?", const="", help=text)
    registry.add_flag(parser)
    text = "do not train: print and plot timeline, work and memory"
    add("--explain", action="store_true", help=text)
    text = "the same, and how long a run takes: compile it, time its first calls"
    add("--time", action="store_true", help=text)
    text = "follow a run live, comma-separated: " + ", ".join(writers.WRITERS)
    add("--writer", metavar="NAMES", default="", help=text)
    hidden = argparse.SUPPRESS
    for setting in SETTINGS:
        add(f"--config.{setting}", help=hidden, default=hidden)
    if name == "tsfl explain":
        parser.set_defaults(explain=True)
    return parser


def parse(name: str, texts: list[str]) -> tuple[Flags, Config]:
    """Parse a command line.

    Args:
      name: how the command is called: "launch.py", "tsfl run", "tsfl sweep", ….
      texts: its arguments.

    Returns:
      The flags, and the validated config.

    Raises:
      UserError: a flag, file or setting that cannot work.
    """
    registry.load_named(texts)  # before there is a flag for each setting
    parser = _make_parser(name)
    flags, unknown = parser.parse_known_args(texts)
    if unknown:
        raise UserError(_unknown(unknown[0], [*vars(flags)]))
    flags.writer = [writer for writer in flags.writer.split(",") if writer]
    writers.check(flags.writer)
    _check_together(name, flags)
    if flags.shard:
        flags.shard = shards.parse(flags.shard)
    changes = {}
    for flag, text in vars(flags).items():
        if flag.startswith("config."):
            setting = flag.removeprefix("config.")
            changes[setting] = value(text, SETTINGS[setting][0], f"--{flag}={text}")
    config = replace(config_files.load(flags.config, "--config="), changes)
    validate(config)
    return flags, config


def _unknown(word: str, flags: list[str]) -> str:
    """What is said of an argument that is no flag, with the one that may be meant."""
    name = word.lstrip("-").partition("=")[0]
    last = name.rpartition(".")[2]  # lr of --lr and of --confg.lr
    same = [n for n in SETTINGS if n.rpartition(".")[2] == last]
    setting = name.removeprefix("config.")
    hint = nearest(name, flags) if setting == name else suggestion(setting)
    hint = f"; did you mean --config.{same[0]}?" if same else hint
    return f"{word}: there is no such flag{hint}"


def _check_together(name: str, flags: Flags) -> None:
    """Raise `UserError` where a flag would be ignored, or another one is missing."""
    is_sweep = bool(flags.sweep or flags.sweep_file)
    if name == "tsfl sweep" and not is_sweep:
        raise UserError("which settings? add --sweep NAME=VALUES")
    ways = sum([flags.shard != "", flags.collect, flags.ray is not None])
    if ways and not (ways == 1 and is_sweep and flags.workdir):
        raise UserError(
            "--shard, --collect, --ray: expected one of them, with --sweep and a "
            "--workdir"
        )


def _label(flags: Flags, config: Config) -> str:
    path, argument = config_files.split(flags.config)  # configs/papers.py:mnist_case1
    name = "-".join(filter(None, (pathlib.Path(path).stem, argument)))
    if flags.sweep or flags.sweep_file:
        return f"{name}-sweep"
    return f"{name}-{config.algorithm}-seed{config.seed}"


def _headline(exp: runner.Experiment) -> str:
    labels, config = exp.labels, exp.prepared.config
    cohort = f"{config.cohort.size:,} of " * (config.cohort.size > 0)
    num_devices = labels["num_devices"]
    return (
        f"{labels['algorithm']} on {labels['data']}: {exp.program.intervals} intervals,"
        f" {cohort}{config.num_clients:,} clients, {labels['model']} with "
        f"{labels['num_parameters']:,} parameters, clients "
        f"{progress.MAPPED[labels['mapping']]} on {num_devices} "
        f"device{'s' * (num_devices != 1)}"
    )


def _interrupts() -> Callable[[], bool]:
    """Make the first Ctrl-C or SIGTERM end the run after its call, the second now."""
    command.check_stopped()
    signals: list[int] = []

    def handler(number: int, frame: Any) -> None:
        del frame
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        print(
            "\nstopping after the intervals of this call; Ctrl-C again: at once",
            file=sys.stderr,
        )

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return lambda: bool(signals)


@contextlib.contextmanager
def _resumable(workdir: str | pathlib.Path) -> Iterator[None]:
    """Answer Ctrl-C with the way to resume, and leave no empty folder."""
    try:
        yield
    except KeyboardInterrupt as error:
        folders = ("checkpoints", "lanes")
        saved = any((report.folder_of(workdir) / name).exists() for name in folders)
        again = f"; the same command with --workdir={workdir} resumes" if saved else ""
        raise command.Ended(f"stopped{again}", 130) from error
    finally:
        with contextlib.suppress(OSError):  # it is not empty
            report.folder_of(workdir).rmdir()


def _points(flags: Flags) -> grid.Points:
    """The points of the sweep that the flags ask for; none: a single run."""
    axes = grid.parse(flags.sweep)
    if not axes and not flags.sweep_file:
        return []
    product = grid.points(axes) if axes else [{}]
    listed = grid.read_points(flags.sweep_file) if flags.sweep_file else [{}]
    return [point | values for point in listed for values in product]


def _explain(flags: Flags, config: Config) -> None:
    """Print and plot what a run would do, and do not run it."""
    progress.log(sys.stderr, "preparing data and model …")
    explanation = explain.explain(config, timed=flags.time, stream=sys.stderr)
    label = f"{_label(flags, config)}-explain"
    workdir = flags.workdir or report.new_workdir("runs", label)
    path = report.prepare_workdir(workdir) / "timeline"
    paths = style.save_both(explanation.plot(), path)
    text = explain.text(explanation)
    files = f"{'files':<15}{', '.join(map(str, paths))}"
    progress.log(sys.stdout, f"{text}\n{files}\n\n{explanation.chart()}")


def _log_notes(stream: IO[str] | None, notes: Iterable[str]) -> None:
    for note in notes:
        progress.log(stream, f"note: {note}")


def _sweep(flags: Flags, config: Config, points: grid.Points) -> None:
    """All runs, then the summary."""
    for values in points:  # before a folder is made
        grid.changed(config, values)
    workdir = report.folder_of(
        flags.workdir or report.new_workdir("runs", _label(flags, config))
    )
    print(f"{len(points)} runs; results in {workdir}", file=sys.stderr)
    files: dict[str, Any] = {"workdir": workdir, "stream": sys.stderr}
    if flags.collect:
        shards.collect(config, points, **files)
    else:
        options = files | {"runs_per_call": flags.runs_per_call, "stop": _interrupts()}
        with _resumable(workdir):
            if flags.shard:
                if shards.run(config, points, flags.shard, **options) is None:
                    return
            elif flags.ray is not None:
                shards.run_on_ray(config, points, flags.ray, **options)
            else:
                sweeps.run(config, points, **options)
    print((workdir / "summary.md").read_text(encoding="utf-8"))


def _train(flags: Flags, config: Config) -> None:
    """Run one experiment."""
    stream = sys.stderr
    progress.log(stream, "preparing data and model …")
    with progress.ticking(stream, "preparing data and model"):
        exp = runner.build(config)
    workdir = flags.workdir or report.new_workdir("runs", _label(flags, config))
    progress.log(stream, _headline(exp))
    progress.log(stream, f"results in {workdir}")
    _log_notes(stream, exp.prepared.notes)
    with _resumable(workdir):
        result = runner.run(exp, workdir, stream, _interrupts(), flags.writer)
    print(progress.summary_text(result.summary, workdir))
    _log_notes(stream, result.summary["notes"][len(exp.prepared.notes) :])
    lost = result.summary["diverged_at"]
    if lost is not None:
        raise command.Ended(
            f"every client's model, or what the rule made of them, became infinite or "
            f"NaN in interval {lost}; the last good model is kept in {workdir}; try a "
            "smaller --config.lr or --config.clip_norm=1",
            1,
        )


def main(name: str, texts: list[str]) -> None:
    """Do what a command line asks for.

    Args:
      name: how the command is called: "launch.py", "tsfl run", "tsfl sweep", ….
      texts: its arguments.
    """
    flags, config = parse(name, texts)
    points = _points(flags)
    # First of all: the first use of JAX starts it with one CPU device.
    devices.start(config.devices)
    if flags.workdir:
        report.check_workdir(flags.workdir)
    if flags.explain or flags.time:
        _explain(flags, config)
    elif points:
        _sweep(flags, config, points)
    else:
        _train(flags, config)
