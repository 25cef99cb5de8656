"""Train one experiment, many with --sweep, or describe them with --explain."""

import argparse
import contextlib
import dataclasses
import math
import pathlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax

from tsfl_jax import command, config_files, interrupts
from tsfl_jax.config import SETTINGS, Config, flat, replace, value
from tsfl_jax.engine import devices, processes
from tsfl_jax.experiment import (
    backend,
    explain,
    grid,
    lanes,
    prepare,
    ray_workers,
    runner,
    shards,
    sweeps,
)
from tsfl_jax.report import files as report
from tsfl_jax.report import progress, style, writers
from tsfl_jax.types import UserError, nearest
from tsfl_jax.validate import suggestion, validate

Given = argparse.Namespace

_MORE = """\
Any setting can be changed with --config.NAME=VALUE, such as --config.lr=0.01:
tsfl settings lists them, tsfl settings data those of one section. The experiments that
--config knows by name are listed by tsfl configs."""


def _make_parser(name: str) -> argparse.ArgumentParser:
    """The flags of all commands that train or explain, and one for each setting."""
    parser = command.make_parser("", __doc__)
    parser.prog, parser.epilog, add = name, _MORE, parser.add_argument
    about = "experiment, by name or file (default: %(default)s)"
    add("--config", metavar="NAME", default="digits_case3", help=about)
    about = "results (default: a new folder under runs/); the same one resumes"
    add("--workdir", metavar="FOLDER", default="", help=about)
    about = "values of a setting: seed=0:10, lr=0.01,0.1, lr=log(1e-3,1e-1,5), lin(…), "
    about += "0.1:0.5:0.1; repeatable, all combinations are run"
    add("--sweep", metavar="NAME=VALUES", action="append", default=[], help=about)
    about = "points of a sweep: a list in YAML or JSON, or a CSV table"
    add("--sweep_file", metavar="FILE", default="", help=about)
    about = "sweep: runs of one compiled call; 0 chooses"
    add("--runs_per_call", metavar="L", type=int, default=0, help=about)
    about = "sweep: run shard i of n, from 0, in a --workdir that all shards share"
    add("--shard", metavar="I/N", default="", help=about)
    about = "sweep: write the tables of what shards have finished, and train nothing"
    add("--collect", action="store_true", help=about)
    about = "sweep: run on the workers of a Ray cluster, by default one on this machine"
    add("--ray", metavar="ADDRESS", nargs="?", const="", help=about)
    about = "do not train: print and plot timeline, work and memory; compile also asks "
    about += "the compiler for the memory"
    both = ("estimate", "compile")
    add("--explain", nargs="?", const="estimate", choices=both, help=about)
    about = "several processes: how many; 0 as Slurm, Open MPI or Kubernetes say"
    add("--processes", metavar="COUNT", type=int, default=1, help=about)
    about = "several processes: which one, from 0"
    add("--process", metavar="INDEX", type=int, default=0, help=about)
    about = "several processes: where process 0 listens"
    add("--coordinator", metavar="HOST:PORT", default="", help=about)
    about = "several processes: seconds to wait for all of them to start"
    add("--join_timeout", metavar="SECONDS", type=float, default=300.0, help=about)
    about = "follow a run live, comma-separated: " + ", ".join(writers.WRITERS)
    add("--writer", metavar="NAMES", default="", help=about)
    hidden = argparse.SUPPRESS
    for setting in SETTINGS:
        add(f"--config.{setting}", help=hidden, default=hidden)
    if name == "tsfl explain":
        parser.set_defaults(explain="estimate")
    return parser


def parse(name: str, texts: list[str]) -> tuple[Given, Config]:
    """Parse a command line.

    Args:
      name: how the command is called: "launch.py", "tsfl run", "tsfl sweep", ….
      texts: its arguments.

    Returns:
      The flags, and the validated config.

    Raises:
      UserError: a flag, file or setting that cannot work.
    """
    parser = _make_parser(name)
    given, unknown = parser.parse_known_args(texts)
    if unknown:
        _refuse(unknown[0], [*vars(given)])
    if name == "tsfl sweep" and not (given.sweep or given.sweep_file):
        raise UserError("which settings? add --sweep NAME=VALUES")
    changes = {}
    for flag, text in vars(given).items():
        if flag.startswith("config."):
            setting, shown = flag.removeprefix("config."), f"--{flag}={text}"
            changes[setting] = value(text, SETTINGS[setting][0], shown)
    given.writer = [writer for writer in given.writer.split(",") if writer]
    writers.check(given.writer)
    config = replace(config_files.load(given.config, "--config="), changes)
    validate(config)
    return given, config


def _refuse(word: str, flags: list[str]) -> NoReturn:
    """Refuse an argument that is no flag, and name the one that may be meant."""
    if not word.startswith("-"):
        raise UserError(
            f"unexpected argument {word!r}; an experiment is --config=mnist_case1, a "
            "setting --config.lr=0.01"
        )
    name = word.lstrip("-").partition("=")[0]
    last = name.rpartition(".")[2]  # lr of --lr and of --confg.lr
    same = [n for n in SETTINGS if n.rpartition(".")[2] == last]
    if same:
        hint = f"; did you mean --config.{same[0]}?"
    elif name.startswith("config."):
        hint = suggestion(name.removeprefix("config."))
    else:
        hint = nearest(name, flags)
    raise UserError(f"{word}: there is no such flag{hint}")


def _join(given: Given, config: Config) -> None:
    """Join the processes that share this run, if there are several."""
    if given.processes < 0:
        raise UserError(f"--processes={given.processes}: expected at least 0")
    if not 0 < given.join_timeout < math.inf:
        raise UserError(f"--join_timeout={given.join_timeout}: expected seconds > 0")
    if given.processes == 1:
        if given.process or given.coordinator:
            raise UserError(
                f"--process={given.process} --coordinator={given.coordinator}: say how "
                "many processes there are, with --processes"
            )
        return
    progress.log(sys.stderr, "waiting for the other processes …")
    processes.join(
        given.coordinator,
        given.processes,
        given.process,
        flat(report.plain(dataclasses.asdict(config))),
        given.join_timeout,
    )


def _label(given: Given, config: Config) -> str:
    path, argument = config_files.split(given.config)  # configs/papers.py:mnist_case1
    name = "-".join(filter(None, (pathlib.Path(path).stem, argument)))
    if given.sweep or given.sweep_file:
        return f"{name}-sweep"
    return f"{name}-{config.algorithm}-seed{config.seed}"


def _headline(exp: runner.Experiment) -> str:
    labels, intervals = exp.labels, exp.program.intervals
    config = exp.prepared.config
    clients = f"{config.cohort.size:,} of " * (config.cohort.size > 0)
    clients += f"{config.num_clients:,} clients"
    number = labels["num_devices"]
    devices_text = f"{number} device{'s' * (number != 1)}"
    return (
        f"{labels['algorithm']} on {labels['data']}: {intervals} intervals, "
        f"{clients}, {labels['model']} with {labels['num_parameters']:,} "
        f"parameters, clients {progress.MAPPED[labels['mapping']]} on "
        f"{devices_text}"
    )


def _interrupts() -> Callable[[], bool]:
    """Make the first Ctrl-C or SIGTERM end the run after its call, the second now."""
    interrupts.check()
    asked: list[bool] = []

    def handler(number: int, frame: Any) -> None:
        del number, frame
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        print(
            "\nstopping after the intervals of this call; Ctrl-C again: at once",
            file=sys.stderr,
        )

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return lambda: bool(asked)


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


def _points(given: Given) -> grid.Points:
    """The points of the sweep that the flags ask for."""
    axes = grid.parse(given.sweep)
    swept = grid.points(axes) if axes else [{}]
    listed = grid.read_points(given.sweep_file) if given.sweep_file else [{}]
    for name in axes:
        if name in grid.names_of(listed):
            raise UserError(f"--sweep={name}: it is in {given.sweep_file}, too")
    return [point | more for point in listed for more in swept]


def _explain(given: Given, config: Config) -> None:
    """Print and plot what a run would do, and do not run it."""
    mesh = backend.start_jax(config)
    progress.log(sys.stderr, "preparing data and model …")
    prepared = prepare.prepare(config)
    known, compiled = explain.of_prepared(prepared, mesh), None
    for note in known.notes:
        progress.log(sys.stderr, f"note: {note}")
    if given.explain == "compile":
        program, arrays = lanes.single(prepared, mesh)
        compiled = program.compile(arrays, stream=sys.stderr).memory()
    label = f"{_label(given, config)}-explain"
    workdir = given.workdir or report.new_workdir("runs", label)
    path = report.prepare_workdir(workdir) / "timeline"
    paths = style.save_both(known.plot(), path)
    words = explain.text(known, compiled)
    files = f"{'files':<15}{', '.join(map(str, paths))}"
    progress.log(sys.stdout, f"{words}\n{files}\n\n{known.chart()}")


def _sweep(given: Given, config: Config, points: grid.Points) -> None:
    """All runs, then the summary."""
    for values in points:  # before a folder is made
        grid.changed(config, values)
    workdir = report.folder_of(
        given.workdir or report.new_workdir("runs", _label(given, config))
    )
    print(f"{len(points)} runs; results in {workdir}", file=sys.stderr)
    more: dict[str, Any] = {"workdir": workdir, "stream": sys.stderr}
    if given.collect:
        shards.collect(config, points, **more)
    else:
        more |= {"runs_per_call": given.runs_per_call, "stop": _interrupts()}
        with _resumable(workdir):
            if given.shard:
                if shards.run(config, points, given.shard, **more) is None:
                    return
            elif given.ray is not None:
                ray_workers.run(config, points, given.ray, **more)
            else:
                sweeps.run(config, points, **more)
    print((workdir / "summary.md").read_text(encoding="utf-8"))


def _train(given: Given, config: Config) -> None:
    """Run one experiment; of several processes the first prints and writes files."""
    stream = sys.stderr if devices.first() else None
    progress.log(stream, "preparing data and model …")
    exp = runner.build(config)
    for note in exp.prepared.notes:
        progress.log(stream, f"note: {note}")
    workdir = given.workdir or "runs"
    if not given.workdir and devices.first():
        workdir = report.new_workdir("runs", _label(given, config))
    progress.log(stream, _headline(exp))
    progress.log(stream, f"results in {workdir}")
    with _resumable(workdir):
        result = runner.run(exp, workdir, stream, _interrupts(), given.writer)
    jax.distributed.shutdown()  # waits for the others; nothing, if there are none
    if stream is not None:
        print(progress.summary_text(result.summary, workdir))
        of_results = result.summary["notes"][len(exp.prepared.notes) :]
        for note in of_results:
            progress.log(stream, f"note: {note}")
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
    given, config = parse(name, texts)
    if given.writer and (given.sweep or given.sweep_file or given.explain):
        raise UserError(f"--writer={','.join(given.writer)}: follows a single run")
    points = _points(given) if given.sweep or given.sweep_file else None
    if points and given.explain:
        raise UserError("--explain: describes one experiment; leave out --sweep")
    if given.processes != 1 and (points or given.explain):
        raise UserError(
            "--processes: a sweep or an explanation runs in one process; leave it out"
        )
    if given.runs_per_call and (given.runs_per_call < 0 or not points):
        raise UserError(
            f"--runs_per_call={given.runs_per_call}: expected a whole number >= 1, "
            "with --sweep"
        )
    several = [given.shard != "", given.collect, given.ray is not None]
    if any(several) and (sum(several) > 1 or not (points and given.workdir)):
        raise UserError(
            "--shard, --collect, --ray: expected one of them, with --sweep and a "
            "--workdir"
        )
    if given.shard:
        given.shard = shards.parse(given.shard)
    # First of all: the first use of JAX starts it with one CPU device.
    devices.start(config.devices)
    _join(given, config)
    # Ray starts processes, which it has to do before JAX starts.
    if given.workdir and (given.ray is not None or devices.first()):
        report.check_workdir(given.workdir)
    if given.explain:
        _explain(given, config)
    elif points:
        _sweep(given, config, points)
    else:
        _train(given, config)
