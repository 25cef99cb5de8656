"""A sweep by several processes, on one machine or many, in one shared folder.

Shards hold one lock each, and the folder's only while they open it and write its
tables; a sweep in one process holds the folder's. On a Ray cluster a shard is a task: a
worker that is lost is replaced, and its shard goes on from the folder. Ray is imported
when it is used.
"""

import contextlib
import dataclasses
import importlib
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from tsfl_jax import registry
from tsfl_jax.config import Config, flat, own_parts, replace
from tsfl_jax.prepare.prepare import adopted
from tsfl_jax.report import files, progress
from tsfl_jax.run import grid, lanes, sweeps
from tsfl_jax.types import UserError, one_line, user_code

RETRIES = 5  # of a shard whose worker was lost
PATIENCE = 300.0  # seconds that a shard waits while another one writes the tables


def parse(text: str) -> tuple[int, int]:
    """The index and the count of ``--shard=1/4``; UserError for anything else."""
    numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    index, count = map(int, numbers.groups()) if numbers else (0, 0)
    if not index < count:
        raise UserError(
            f"--shard={text}: expected i/n with 0 <= i < n, such as 0/4 for the first "
            "of four"
        )
    return index, count


def divide(groups: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Divide the runs of a sweep into shards.

    Laid out group by group, the R runs are cut at k·R/n, k = 1 … n−1. A cut moves to a
    boundary between two groups that is at most R/(4n) away, so that few groups are
    compiled in two shards, and a shard has half to one and a half of the mean.

    Args:
      groups: runs of each compiled program, from `lanes.group`.
      count: n ≥ 1.

    Returns:
      The runs of each shard, ascending; some are empty if n > R.
    """
    order = list(itertools.chain(*groups))
    boundaries = [0, *itertools.accumulate(map(len, groups))]
    cuts = [0]
    for k in range(1, count):
        cut = k * len(order) / count
        nearest = min(boundaries, key=lambda end, cut=cut: abs(end - cut))
        near = 4 * count * abs(nearest - cut) <= len(order)
        cuts.append(nearest if near else round(cut))
    parts = itertools.pairwise([*cuts, len(order)])
    return [sorted(order[first:end]) for first, end in parts]


@contextlib.contextmanager
def hold(folder: pathlib.Path, index: int, count: int) -> Iterator[None]:
    """Hold shard `index` of `count`; refused while the folder is divided otherwise."""
    with contextlib.ExitStack() as locks:
        with files.lock(folder, patience=PATIENCE):
            sweeps.check_no_shard(folder, but=f"-of-{count}")
            locks.enter_context(files.lock(folder, f".shard-{index}-of-{count}"))
        yield


def run(
    config: Config, swept: sweeps.Swept, shard: tuple[int, int], **options: Any
) -> sweeps.SweepResult | None:
    """Run or resume one shard of a sweep; the last one to end writes the tables.

    Args:
      config: as in `doors.sweep`.
      swept: the whole sweep, the same in all processes.
      shard: index from 0, and count; see `divide`.
      **options: of `sweeps.make`; workdir is a folder that all processes see, on a file
        system with locks.

    Returns:
      The result of the whole sweep if this call wrote its tables, else None.

    Raises:
      UserError: what `doors.sweep` refuses, or a shard that another process has.
    """
    sweep = sweeps.make(config, swept, **options)
    (index, count), folder = shard, sweep.folder
    assert folder
    runs = divide(lanes.group(sweep.runs), count)[index]
    with hold(folder, index, count):
        progress.log(sweep.stream, f"shard {index}/{count}: {len(runs)} runs")
        if runs:
            sweeps.run_all(sweep.only(runs))
        with files.lock(folder, patience=PATIENCE):
            paths = [sweeps.path_of(folder, digest) for digest in sweep.digests]
            missing = sum(not path.exists() for path in paths)
            written = files.read_json(folder / "sweep.json") or {}
            settings = files.plain(sweep.settings())
            has_tables = settings | written == written
            if not missing and not has_tables:
                return sweeps.collect(sweep)
    unfinished = f"{missing} of {len(sweep.runs)} runs are left to other shards"
    progress.log(sweep.stream, unfinished if missing else "the tables are there")
    return None


def collect(
    config: Config, swept: sweeps.Swept, *, workdir: str | pathlib.Path, **options: Any
) -> sweeps.SweepResult | None:
    """Write the tables of the runs that have finished; train nothing.

    Args:
      config: this and all others as of `run`.

    Returns:
      The result of the sweep, None while runs are missing.

    Raises:
      UserError: none of the runs is in the folder.
    """
    folder = files.folder_of(workdir)
    if not (folder / "lanes").is_dir():
        raise UserError(f"--collect: {workdir} is not the folder of a sweep")
    sweep = sweeps.make(config, swept, workdir=workdir, **options)
    with files.lock(folder, patience=PATIENCE):
        return sweeps.collect(sweep)


# What all workers get: settings by name, the points, and options of `sweeps.make`.
_Task = tuple[dict[str, Any], grid.Points, dict[str, Any]]


def _work(task: _Task, shard: tuple[int, int] | None) -> sweeps.SweepResult | None:
    """What a worker does: one shard; None: the tables."""
    settings, points, options = task
    for source in options.pop("components"):
        registry.load(source)
    with user_code("--ray: not known to a worker", "name its file by --components"):
        config = replace(Config(), settings)
    if shard:
        return run(config, points, shard, **options)
    return collect(config, points, **options)


def run_on_ray(
    config: Config,
    swept: sweeps.Swept,
    address: str = "",
    *,
    workdir: str | pathlib.Path | None,
    runs_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **custom: Any,
) -> sweeps.SweepResult:
    """Run or resume a sweep on Ray's workers, as many as its GPUs or CPUs allow.

    A worker takes `config.devices` GPUs or CPUs; 0 is one.

    Args:
      config: as in `doors.sweep`, and so are swept, runs_per_call and custom, which are
        pickled.
      swept: the whole sweep.
      address: of the cluster; "": ``$RAY_ADDRESS``, one that runs on this machine, or a
        new one on it.
      workdir: folder that all workers see under this path.
      stream: gets the number of workers.
      stop: asked every second; True ends the workers and raises KeyboardInterrupt.

    Raises:
      UserError: what `doors.sweep` refuses, Ray cannot be imported or reached, or a
        shard lost its worker more than `RETRIES` times.
    """
    if not workdir:
        raise UserError("ray: needs a workdir, a folder that all workers see")
    folder = files.folder_of(workdir).absolute()
    named_config, parts = adopted(config, **custom)
    points = grid.points(swept)
    if not own_parts(named_config):  # a rule of the package goes by its name
        config, custom = named_config, parts._asdict()
    with _cluster(address) as ray:
        resources, devices = ray.cluster_resources(), max(1, config.devices)
        kind = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        settings, default = (flat(dataclasses.asdict(c)) for c in (config, Config()))
        settings = {n: v for n, v in settings.items() if v != default[n]}
        settings |= {"devices": devices} if kind == "CPU" else {}
        count = min(int(resources.get(kind, 0) // devices), len(points))
        if not count:
            raise UserError(f"--config.devices={devices}: Ray's cluster has fewer")
        # A worker ends with its shard, since JAX keeps devices and memory.
        resource = {f"num_{kind.lower()}s": devices}
        work = ray.remote(max_retries=RETRIES, max_calls=1, **resource)(_work)
        with user_code("--ray: a part cannot be sent", "expected what can be pickled"):
            options = {"workdir": folder, "runs_per_call": runs_per_call, **custom}
            options["components"] = [*registry.sources]
            task = ray.put((settings, points, options))
        progress.log(stream, f"{count} Ray workers with {devices} {kind}s each")
        ids = [(index, count) for index in range(count)]
        tasks = {work.remote(task, id_): f"shard {id_[0]}/{count}" for id_ in ids}
        result = _results(ray, tasks, stop, stream)
        # None wrote the tables if they were there before.
        if not result:
            result = _results(ray, {work.remote(task, None): "tables"}, stop, stream)
        return result


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster; a connection that was there stays."""
    with user_code("--ray: Ray is not installed", "pip install 'tsfl_jax[ray]'"):
        ray = importlib.import_module("ray")
    if ray.is_initialized():
        yield ray
        return
    with user_code(f"--ray={address}: no connection", "expected a running cluster"):
        quiet = {"log_to_driver": False, "logging_level": "error"}
        ray.init(address=address or None, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


def _results(
    ray: Any, tasks: Mapping[Any, str], stop: Callable[[], bool], stream: IO[str] | None
) -> Any:
    """Wait for tasks by name; the one result, if a task has one."""
    result, waiting, task = None, [*tasks], None
    try:
        while waiting:
            ready, waiting = ray.wait(waiting, timeout=1.0)
            for task in ready:
                result = ray.get(task) or result
                progress.log(stream, f"{tasks[task]} has ended")
            if stop() and waiting:
                raise KeyboardInterrupt
    except UserError as error:  # with the worker's traceback around it
        raise UserError(one_line(getattr(error, "cause", error))) from None
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise UserError(
            f"--ray: {tasks.get(task)} failed ({type(cause).__name__}: "
            f"{one_line(cause, 200)}); the same command resumes, and --shard in place "
            "of --ray shows an error of the run itself"
        ) from error
    finally:
        for task in waiting:
            ray.cancel(task, force=True)
    return result
