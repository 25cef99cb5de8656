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
from tsfl_jax.prepare.custom_hooks import Custom
from tsfl_jax.prepare.prepare import adopted
from tsfl_jax.report import files, progress
from tsfl_jax.run import grid, shards, sweeps
from tsfl_jax.types import UserError, one_line, user_code

RETRIES = 5  # of a shard whose worker was lost


# What all workers get: settings by name, the points, and options of `sweeps.make`.
_Task = tuple[dict[str, Any], grid.Points, dict[str, Any]]


def _work(task: _Task, shard: tuple[int, int] | None) -> sweeps.SweepResult | None:
    """What a worker does: one shard; None: the tables."""
    settings, points, options = task
    config = replace(Config(), settings)
    if shard:
        return shards.run(config, points, shard, **options)
    return shards.collect(config, points, **options)


def run(
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
    named_config, parts = adopted(config, Custom(**custom))
    points = grid.points(swept, settings_of(type(named_config)))
    if type(named_config) is type(config):  # a rule of the package goes by its name
        config, custom = named_config, parts._asdict()
    with _cluster(address) as ray:
        resources, devices = ray.cluster_resources(), max(1, config.devices)
        kind = "GPU" if resources.get("GPU", 0) >= 1 else "CPU"
        settings = flat(dataclasses.asdict(config))
        settings |= {"devices": devices} if kind == "CPU" else {}
        count = min(int(resources.get(kind, 0) // devices), len(points))
        if not count:
            raise UserError(f"--config.devices={devices}: Ray's cluster has fewer")
        # A worker ends with its shard, since JAX keeps devices and memory.
        resource = {f"num_{kind.lower()}s": devices}
        work = ray.remote(max_retries=RETRIES, max_calls=1, **resource)(_work)
        with user_code("--ray: a part cannot be sent", "expected what can be pickled"):
            options = {"workdir": folder, "runs_per_call": runs_per_call, **custom}
            task = ray.put((settings, points, options))
        progress.log(stream, f"{count} Ray workers with {devices} {kind}s each")
        ids = [(index, count) for index in range(count)]
        tasks = {work.remote(task, id_): f"shard {id_[0]}/{count}" for id_ in ids}
        result = _results(ray, tasks, stop, stream)
        # None wrote the tables if they were there before.
        if not result:
            tables = {work.remote(task, None): "the tables"}
            result = _results(ray, tables, stop, stream)
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
        if ":" in address and "//" not in address:  # Ray would wait for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        quiet = {"log_to_driver": False, "logging_level": "error"}
        ray.init(address=address or None, **quiet)
    try:
        yield ray
    finally:
        ray.shutdown()


def _results(
    ray: Any,
    tasks: Mapping[Any, str],
    stop: Callable[[], bool],
    stream: IO[str] | None,
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
