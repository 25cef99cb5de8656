"""A sweep on the workers of a Ray cluster, one shard each.

A shard is a Ray task. A worker that is lost is replaced, and its shard goes on from the
shared folder. Ray is imported when it is used.
"""

import contextlib
import dataclasses
import importlib
import pathlib
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

from tsfl_jax.config import Config, flat, replace, settings_of
from tsfl_jax.experiment import grid, shards, sweep_folder, sweeps
from tsfl_jax.experiment.custom_hooks import Own
from tsfl_jax.experiment.prepare import adopted
from tsfl_jax.report import files, progress
from tsfl_jax.types import UserError, one_line, user_code

RETRIES = 5  # of a shard whose worker was lost


def _work(task: tuple, shard: tuple[int, int] | None) -> sweeps.SweepResult | None:
    """What a worker does: one shard; None: the tables."""
    settings, points, workdir, runs_per_call, own = task
    config = replace(Config(), settings)
    if shard is None:
        return shards.collect(config, points, workdir=workdir, **own)
    options = {"workdir": workdir, "runs_per_call": runs_per_call}
    return shards.run(config, points, shard, **options, **own)


def run(
    config: Config,
    swept: shards.Swept,
    address: str = "",
    *,
    workdir: str | pathlib.Path | None,
    runs_per_call: int = 0,
    stream: IO[str] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **own: Any,
) -> sweeps.SweepResult:
    """Run or resume a sweep on Ray's workers, as many as its GPUs or CPUs allow.

    A worker takes `config.devices` GPUs or CPUs; 0 is one.

    Args:
      config: as in `sweeps.sweep`, and so are swept, runs_per_call and own, which are
        pickled.
      swept: the whole sweep.
      address: of the cluster; "": ``$RAY_ADDRESS``, one that runs on this machine, or a
        new one on it.
      workdir: folder that all workers see under this path.
      stream: gets the number of runs that have finished.
      stop: asked every second; True ends the workers and raises KeyboardInterrupt.

    Raises:
      UserError: what `sweeps.sweep` refuses, Ray cannot be imported or reached, or a
        shard lost its worker more than `RETRIES` times.
    """
    if workdir is None:
        raise UserError("ray: needs a workdir, a folder that all workers see")
    folder = files.folder_of(workdir).absolute()
    known, parts = adopted(config, Own(**own))
    points = grid.points(swept, settings_of(type(known)))
    if type(known) is type(config):  # a rule of the package goes by its name
        config, own = known, parts._asdict()
    with _cluster(address) as ray:
        there, each = ray.cluster_resources(), max(1, config.devices)
        gpu = there.get("GPU", 0) >= 1
        settings = flat(dataclasses.asdict(config)) | ({} if gpu else {"devices": each})
        count = int(there.get("GPU" if gpu else "CPU", 0) // each)
        if not count:
            raise UserError(
                f"--config.devices={each}: Ray's cluster has "
                f"{there.get('GPU' if gpu else 'CPU', 0):.0f}"
            )
        count = min(count, len(points))
        # A worker ends with its shard, since JAX keeps devices and memory.
        options = {"max_retries": RETRIES, "max_calls": 1}
        work = ray.remote(**options, **{"num_gpus" if gpu else "num_cpus": each})(_work)
        with user_code("--ray: a part cannot be sent", "expected what can be pickled"):
            task = ray.put((settings, points, folder, runs_per_call, own))
        kind = "GPUs" if gpu else "CPUs"
        progress.log(stream, f"{count} Ray workers with {each} {kind} each")
        names = [f"shard {index}/{count}" for index in range(count)]
        tasks = {work.remote(task, (i, count)): name for i, name in enumerate(names)}
        show = _shown(folder, len(points), stream)
        found = _results(ray, tasks, lambda: (show(), stop())[1])
        # None wrote the tables if they were there before.
        return found or _results(ray, {work.remote(task, None): "the tables"}, stop)


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[Any]:
    """Ray, connected to a cluster; a connection that was there stays."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise UserError(
            "--ray: Ray is not installed; pip install 'tsfl_jax[ray]'"
        ) from error
    there = ray.is_initialized()
    try:
        if not there:
            if ":" in address and "//" not in address:  # Ray would wait for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=10).close()
            quiet = {"log_to_driver": False, "logging_level": "error"}
            ray.init(address=address or None, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"--ray={address}: {one_line(error)}") from error
    try:
        yield ray
    finally:
        if not there:
            ray.shutdown()


def _results(ray: Any, tasks: Mapping[Any, str], stop: Callable[[], bool]) -> Any:
    """Wait for tasks by name; the one result that is not None, if there is one."""
    found, wanted, task = None, [*tasks], None
    try:
        while wanted:
            ready, wanted = ray.wait(wanted, timeout=1.0)
            for task in ready:
                done = ray.get(task)
                found = found if done is None else done
            if stop() and wanted:
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
        for task in wanted:
            ray.cancel(task, force=True)
    return found


def _shown(
    folder: pathlib.Path, total: int, stream: IO[str] | None
) -> Callable[[], None]:
    """A function that logs how many runs are in the folder, if there are more."""
    shown = 0

    def show() -> None:
        nonlocal shown
        path = folder / sweep_folder.DIVISION
        runs = (files.read_json(path, {"runs": list}) or {}).get("runs", [])
        done = sum(sweep_folder.path_of(folder, name).exists() for name in runs)
        if len(runs) == total and done > shown:  # else of an earlier sweep
            shown = done
            progress.log(stream, f"{done} of {total} runs have finished")

    return show
