"""The command line of one experiment, a sweep or an explanation: see ``launch.py``."""

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
from absl import flags
from ml_collections import config_flags

from tsfl_jax import command, config_files, validate
from tsfl_jax.config import SETTINGS, Config, flat
from tsfl_jax.engine import devices, processes
from tsfl_jax.experiment import (
    assemble,
    backend,
    explain,
    grid,
    lane_notes,
    own_hooks,
    prepare,
    program,
    rule_settings,
    runner,
    sweep_file,
    sweeps,
)
from tsfl_jax.report import files as report
from tsfl_jax.report import progress, settings, timeline
from tsfl_jax.types import UserError, one_line

# `parse` adds the default file: one given here would be read, and its overrides
# applied, while flags are defined, where a wrong value cannot end in one clear line.
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Experiment file (default: configs/digits_case3.py)."
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator", "", "Several processes: host:port on which process 0 listens."
)
_PROCESSES = flags.DEFINE_integer(
    "processes",
    1,
    "Several processes: how many; 0 as Slurm, Open MPI or Kubernetes say.",
)
_PROCESS = flags.DEFINE_integer("process", 0, "Several processes: which one, from 0.")
_JOIN_TIMEOUT = flags.DEFINE_float(
    "join_timeout", 300, "Several processes: seconds to wait for all of them to start."
)
_SWEEP = flags.DEFINE_multi_string(
    "sweep",
    [],
    "Setting and its values: seed=0:10, lr=0.01,0.1, lr=log(1e-3,1e-1,5), lin(…), "
    "0.1:0.5:0.1; repeatable.",
)
_SWEEP_FILE = flags.DEFINE_string(
    "sweep_file", "", "Sweep of a YAML or JSON file: grid, list, random points."
)
_SAMPLES = flags.DEFINE_integer(
    "samples", 0, "With --sweep_file: random points, instead of as many as it says."
)
_LANES = flags.DEFINE_integer(
    "lanes_per_call",
    0,
    "Sweeps: lanes of one compiled call; 0 chooses.",
    lower_bound=0,
)
_EXPLAIN = flags.DEFINE_enum(
    "explain",
    None,
    ["estimate", "compile"],
    "Do not train: print and plot the timeline, work, padding and memory; "
    "--explain=compile also asks the compiler for the memory.",
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "Folder for results; empty: a new one under runs/."
)


def _check_flags(argv: list[str]) -> None:
    """Answer the usual mistakes in one line instead of the flag library's traceback."""
    for position, argument in enumerate(argv[1:], start=1):
        if not argument.startswith("-"):
            continue
        flag, equals, value = argument.lstrip("-").partition("=")
        if flag == "config":
            config_files.find(
                value if equals else (argv[position + 1 : position + 2] or [""])[0]
            )
        elif flag.startswith("config."):
            name = flag.removeprefix("config.")
            if name not in SETTINGS:
                hint = validate.suggestion(name)
                raise UserError(f"--{flag}: there is no such setting{hint}")
        elif flag not in flags.FLAGS and settings.suggestion(flag):
            given = argument.lstrip("-").replace(
                flag, f"--config.{settings.suggestion(flag)}", 1
            )
            raise UserError(f"--{flag}: settings begin with config: {given}")
        elif (setting := flag.partition(".")[2]) in SETTINGS:
            meant = f"--config.{setting}"
            raise UserError(f"--{flag}: there is no such flag; did you mean {meant}?")


def _last_overrides(words: list[str]) -> list[str]:
    """Leave out overrides that a later one of the same setting replaces.

    The flag library joins repeated tuples: (1,4) and then (2,2) would be (1,4,2,2).
    """
    kept, position = {}, 0
    while position < len(words):
        word, length = words[position], 1
        name, equals, _ = word.lstrip("-").partition("=")
        setting = word.startswith("-") and name.startswith("config.")
        following = words[position + 1 : position + 2]
        if setting and not equals and following and not following[0].startswith("--"):
            length = 2  # --config.lr 0.1
        kept[name if setting else position] = words[position : position + length]
        position += length
    return [word for part in kept.values() for word in part]


def _config_first(argv: list[str]) -> list[str]:
    """Put --config before its overrides, once, as the flag library needs it."""
    chosen, rest, words = [], [], iter(_last_overrides(argv[1:]))
    for word in words:
        if word.lstrip("-") == "config" and word.startswith("-"):
            chosen.append(f"--config={config_files.find(next(words, ''))}")
        elif word.startswith(("--config=", "-config=")):
            chosen.append(f"--config={config_files.find(word.partition('=')[2])}")
        elif word in ("--explain", "-explain"):  # a value is optional
            rest.append("--explain=estimate")
        else:
            rest.append(word)
    if len(chosen) > 1:
        raise UserError(f"--config is given {len(chosen)} times; choose one")
    return argv[:1] + (chosen or [f"--config={config_files.DEFAULT}"]) + rest


def _shown(flag: flags.Flag) -> settings.Flag:
    """A flag for ``--help``."""
    choices = tuple(getattr(flag.parser, "enum_values", None) or ())
    text = str(flag.help).split(";\n")[0].split(">: ")[-1]  # without absl's additions
    default = flag.default if isinstance(flag.default, str | int | float) else None
    return settings.Flag(flag.name, choices, text, default)


def parse(argv: list[str]) -> list[str]:
    """Parse the command line; a mistake in it ends the process with one line."""
    if any(word in ("-h", "--h", "-help", "--help") for word in argv[1:]):
        own = flags.FLAGS.get_flags_for_module(__name__)
        print(settings.help_text(argv[0], map(_shown, own)))
        sys.exit(0)
    try:
        _check_flags(argv)
        argv = _config_first(argv)
        sys.argv[1:] = argv[1:]  # the flag of --config looks there for overrides
        rest = flags.FLAGS(argv)
    except (UserError, flags.Error) as error:
        while isinstance(error.__context__, UserError | flags.Error):
            error = error.__context__  # the flag library adds a traceback to it
        _stop(grid.wrong_value(one_line(error)))
    except Exception as error:  # whatever a user's config file raises
        reason = one_line(error)
        _stop(f"cannot read the config: {type(error).__name__}: {reason}")
    if rest[1:]:
        _stop(
            f"unexpected argument {rest[1]!r}; an experiment is --config=mnist_case1, "
            "a setting --config.lr=0.01"
        )
    if argv[0] == "tsfl sweep" and not _sweeps():
        _stop("sweep: which settings? add --sweep NAME=VALUES")
    return rest


def _program() -> str:
    """What the user called."""
    name = pathlib.Path(sys.argv[0]).stem
    return "tsfl" if name in ("tsfl", "__main__") else "launch.py"


def _stop(message: str, code: int = 2) -> NoReturn:
    """End with one line."""
    line = "\n" if sys.stderr.isatty() else ""  # below a progress line
    print(f"{line}{_program()}: {message}", file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():  # at its end Python would wait for the others
        time.sleep(devices.first())  # JAX ends them when process 0 does
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _join(config: Config) -> None:
    """Join the processes that share this run, if there are several."""
    count, several = _PROCESSES.value, ("process", "coordinator", "join_timeout")
    if count < 0:
        raise UserError(f"--processes={count}: expected at least 0")
    for name in several:
        if not flags.FLAGS["processes"].present and flags.FLAGS[name].present:
            raise UserError(
                f"--{name}={flags.FLAGS[name].value}: say how many processes there "
                "are, with --processes"
            )
    if not 0 < _JOIN_TIMEOUT.value < math.inf:
        raise UserError(f"--join_timeout={_JOIN_TIMEOUT.value}: expected seconds > 0")
    if count == 1:
        if _PROCESS.value != 0:
            raise UserError(
                f"--process={_PROCESS.value}: expected 0 with --processes=1"
            )
        return
    progress.log(sys.stderr, "waiting for the other processes …")
    processes.join(
        _COORDINATOR.value,
        count,
        _PROCESS.value,
        flat(report.plain(dataclasses.asdict(config))),
        _JOIN_TIMEOUT.value,
    )


def _label(config: Config) -> str:
    path = getattr(flags.FLAGS["config"], "config_filename")  # noqa: B009
    path, argument = config_files.split(path)  # configs/papers.py:mnist_case1
    name = "-".join(filter(None, (pathlib.Path(path).stem, argument)))
    if _sweeps():
        return f"{name}-sweep"
    return f"{name}-{config.algorithm}-seed{config.seed}"


def _headline(exp: assemble.Experiment) -> str:
    labels, intervals = exp.labels, exp.program.intervals
    clients = len(exp.arrays.problem.client)
    number = labels["num_devices"]
    devices_text = f"{number} device{'s' * (number != 1)}"
    return (
        f"{labels['algorithm']} on {labels['data']}: {intervals} intervals, "
        f"{clients} clients, {labels['model']} with {labels['num_parameters']:,} "
        f"parameters, clients {progress.MAPPED[labels['mapping']]} on "
        f"{devices_text}"
    )


def _check_workdir(path: pathlib.Path) -> None:
    """Check before the work that a folder can be written or made, and make none."""
    path = report.folder_of(path)
    # Folders that are not there may be made by another command at the same time.
    there = (p for p in (path, *path.parents) if p.exists())
    report.prepare_workdir(next(there, path))


def _interrupts() -> Callable[[], bool]:
    """Make the first Ctrl-C or SIGTERM end the run after its chunk, the second now."""
    asked: list[bool] = []

    def handler(number: int, frame: Any) -> None:
        del number, frame
        if asked:
            raise KeyboardInterrupt
        asked.append(True)
        print("\nstopping after this chunk; Ctrl-C again: at once", file=sys.stderr)

    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)
    return lambda: bool(asked)


def _explain(config: Config) -> None:
    """Print and plot what a run would do, and do not run it."""
    mesh = backend.start_jax(config)
    progress.log(sys.stderr, "preparing data and model …")
    prepared = prepare.prepare_validated(config, own_hooks.Own())
    known, compiled = explain.of_prepared(prepared, mesh), None
    _print_notes(known.notes)
    if _EXPLAIN.value == "compile":
        arrays = program.make_arrays(prepared, mesh)
        run = program.make_program([prepared], mesh).compile(arrays, stream=sys.stderr)
        compiled = run.memory()
    workdir = _WORKDIR.value or report.new_workdir("runs", f"{_label(config)}-explain")
    path = report.prepare_workdir(workdir) / "timeline"
    paths = timeline.plot_timeline(known.timeline, known.settings, path)
    words = explain.text(known, compiled)
    files = f"{'files':<15}{', '.join(map(str, paths))}"
    progress.log(sys.stdout, f"{words}\n{files}\n\n{known.chart()}")


def _print_notes(notes: Sequence[str]) -> None:
    for note in dict.fromkeys(notes):
        progress.log(sys.stderr, f"note: {note}")


def _explain_sweep(config: Config) -> None:
    """Print what a sweep would do, and do not run it."""
    points = _points()
    configs = [grid.changed(config, values) for values in points]
    mesh = backend.start_jax(config)
    progress.log(sys.stderr, "preparing data and model …")
    several = prepare.prepare_all(configs)
    notes = lane_notes.merged([prepared.notes for prepared in several], configs)
    _print_notes(notes)
    print(explain.sweep_text(points, several, mesh, _LANES.value))


def _sweeps() -> bool:
    """Whether the flags ask for a sweep."""
    return bool(_SWEEP.value or _SWEEP_FILE.value)


def _points() -> list[dict[str, Any]]:
    """The points of the sweep that the flags ask for."""
    swept = grid.parse(_SWEEP.value)
    if _SWEEP_FILE.value:
        return sweep_file.points(_SWEEP_FILE.value, _SAMPLES.value, swept)
    return grid.points(swept)


def _sweep(config: Config) -> None:
    """All lanes, then the summary."""
    points = _points()
    configs = [grid.changed(config, values) for values in points]
    workdir = report.folder_of(
        _WORKDIR.value or report.new_workdir("runs", _label(config))
    )
    print(f"{len(points)} lanes; results in {workdir}", file=sys.stderr)
    with _resumable(workdir):
        sweeps.run_validated(
            config,
            points,
            configs,
            workdir=workdir,
            lanes_per_call=_LANES.value,
            stream=sys.stderr,
            stop=_interrupts(),
        )
    print((workdir / "summary.md").read_text(encoding="utf-8"))


def _train(config: Config) -> None:
    """Run one experiment; of several processes the first prints and writes files."""
    stream = sys.stderr if devices.first() else None
    progress.log(stream, "preparing data and model …")
    with progress.heartbeat(stream) as doing:
        doing("preparing, and estimating L, G², σ² if they are not given")
        exp = assemble.build(config)
    for note in exp.notes:
        progress.log(stream, f"note: {note}")
    workdir = _WORKDIR.value or "runs"
    if not _WORKDIR.value and devices.first():
        workdir = report.new_workdir("runs", _label(config))
    progress.log(stream, _headline(exp))
    progress.log(stream, f"results in {workdir}")
    with _resumable(workdir):
        result = runner.run(exp, workdir, stream, _interrupts())
    jax.distributed.shutdown()  # waits for the others; nothing, if there are none
    if stream is not None:
        print(progress.summary_text(result.summary, workdir))
        for note in result.summary["notes"][len(exp.notes) :]:  # of the results
            progress.log(stream, f"note: {note}")
    lost = result.summary["diverged_at"]
    if lost is not None:
        _stop(
            f"every client's model, or what the rule made of them, became infinite or "
            f"NaN in interval {lost}; the last good model is kept in {workdir}; try a "
            "smaller --config.lr or --config.clip_norm=1",
            1,
        )


@contextlib.contextmanager
def _resumable(workdir: str | pathlib.Path) -> Iterator[None]:
    """Answer Ctrl-C with the way to resume."""
    try:
        yield
    except KeyboardInterrupt:
        folders = ("checkpoints", "lanes")
        saved = any((report.folder_of(workdir) / name).exists() for name in folders)
        again = f"; the same command with --workdir={workdir} resumes" if saved else ""
        _stop(f"stopped{again}", 130)


def _check_combination() -> None:
    """Raise UserError for flags that exclude each other."""
    several = _PROCESSES.value != 1
    if _EXPLAIN.value and several:
        raise UserError(
            "--explain and --processes: an explanation runs in one process; leave out "
            "--processes"
        )
    if _EXPLAIN.value == "compile" and _sweeps():
        raise UserError(
            "--explain=compile and --sweep: only one experiment can be compiled; "
            "--explain describes the sweep"
        )
    if flags.FLAGS["lanes_per_call"].present and not _sweeps():
        raise UserError(
            f"--lanes_per_call={_LANES.value}: would be ignored without --sweep"
        )
    if flags.FLAGS["samples"].present and not (
        _SWEEP_FILE.value and _SAMPLES.value > 0
    ):
        raise UserError(
            f"--samples={_SAMPLES.value}: expected at least 1, with --sweep_file"
        )
    if _sweeps() and several:
        raise UserError(
            "--sweep and --processes: a sweep runs in one process; give every "
            "process its own part"
        )


def main(argv: list[str]) -> None:
    """Validate the config and do what the flags ask for."""
    del argv
    config = _CONFIG.value
    try:
        if not isinstance(config, Config):
            raise UserError("get_config() of a config file must return a Config")
        rule_settings.validate(config)
        _check_combination()
        # First of all: the first use of JAX starts it with one CPU device.
        devices.start(config.devices)
        _join(config)
        if _WORKDIR.value and devices.first():
            _check_workdir(pathlib.Path(_WORKDIR.value))
        if _EXPLAIN.value and _sweeps():
            _explain_sweep(config)
        elif _EXPLAIN.value:
            _explain(config)
        elif _sweeps():
            _sweep(config)
        else:
            _train(config)
    except UserError as error:
        _stop(str(error))
    except KeyboardInterrupt:
        _stop("stopped", 130)
    except Exception as error:
        if command.out_of_memory(error):
            reason = one_line(error)
            _stop(f"not enough memory ({reason}); {command.LESS_MEMORY}")
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        _stop(
            f"{type(error).__name__}: {one_line(error)}; if another process was lost, "
            "the same commands with the same --workdir resume",
            1,
        )
