"""What the benchmarks share: experiments, side-by-side timing, Markdown tables."""

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tsfl_jax import config
from tsfl_jax.engine import client, devices, scan
from tsfl_jax.models import networks
from tsfl_jax.models.networks import ModelConfig
from tsfl_jax.report import files
from tsfl_jax.run import lanes, program, runner

SHAPES = {
    "mnist_cnn": (28, 28, 1),
    "fashion_cnn": (28, 28, 1),
    "vgg11": (32, 32, 3),
    "resnet18": (32, 32, 3),
}


def make_config(model: str, **settings) -> config.Config:
    """FedAvg on synthetic images of the model's shape, with settings changed."""
    c = config.Config(algorithm="fedavg", num_intervals=1, report_every=1)
    c.compile_cache = "off"
    c.data.name, c.data.shape = "synthetic", SHAPES[model]
    c.data.train_size, c.data.test_size = 60_000, 10_000
    c.model.name = model
    c.model.norm = "group" if model == "resnet18" else "none"
    c.partition.kind, c.schedule.data_size = "iid", 1024
    return changed(c, settings)


def changed(c: config.Config, settings: dict) -> config.Config:
    """The config after changing settings by name, such as ``data__name``."""
    for name, value in settings.items():
        *path, last = name.split("__")
        setattr(functools.reduce(getattr, path, c), last, value)
    return c


def make_experiment(model: str, **settings) -> runner.Experiment:
    """The experiment of `make_config`."""
    return runner.build(make_config(model, **settings))


def first_chunk(
    program: program.Program, arrays: program.Arrays, evaluate: bool = False
) -> tuple[Callable[[], None], program.Compiled]:
    """The first chunk as a function without arguments, and the compiled program."""
    inputs = arrays.inputs
    inputs = inputs._replace(evaluate=np.full_like(inputs.evaluate, evaluate))
    arrays = arrays._replace(inputs=inputs)
    compiled = program.compile(arrays)
    _, *others = program.arguments(arrays, arrays.start, 0)

    def run() -> None:
        # A call takes over the memory of its state.
        state = devices.place(program.mesh, arrays.start, scan.WHOLE)
        jax.block_until_ready(compiled.call(state, *others))

    return run, compiled


def compiled(exp: runner.Experiment, evaluate: bool = False) -> Callable[[], None]:
    """The first chunk of an experiment as a function without arguments."""
    return first_chunk(exp.program, exp.arrays, evaluate)[0]


def torch_interval(
    name: str, exp: runner.Experiment, best: bool = False
) -> Callable[[], None] | None:
    """The first interval as a PyTorch loop over clients; None without PyTorch.

    best: in PyTorch's fastest set-up, see `torch_loop.make_best`.
    """
    try:
        from benchmarks import torch_loop
    except ImportError:
        return None
    *_, problem, inputs = lanes.arguments_of_run(exp.arrays, exp.program.intervals)
    names = "batch_size", "lr", "momentum"
    make = torch_loop.make_best if best else torch_loop.make_interval
    return make(
        name,
        np.asarray(problem.samples.x),
        np.asarray(problem.samples.y),
        np.asarray(problem.rows),
        inputs.tau[0],
        inputs.size[0],
        **{setting: config.get(exp.prepared.config, setting) for setting in names},
    )


def flop_per_sample(model: str, batch_size: int = 32) -> float:
    """Of one training step with direct convolutions, as XLA counts them."""
    norm = "group" if model == "resnet18" else "none"
    module = networks.make_model(ModelConfig(model, norm), 10, SHAPES[model], "lax")
    network = networks.from_flax(module)

    def gradient(variables, x):
        y, mask = jnp.zeros(batch_size, jnp.int32), jnp.ones(batch_size, bool)
        batch = client.Batch(x, y, mask, jax.random.key(0))
        return client.batch_gradient(network, variables, batch)

    # On a GPU it would not know the FLOP of calls of libraries.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        x = jnp.zeros((batch_size, *SHAPES[model]))
        variables = network.init(jax.random.key(0), x)
        cost = jax.jit(gradient).lower(variables, x).compile().cost_analysis()
    return cost["flops"] / batch_size


def matrix_product() -> tuple[Callable[[], None], float]:
    """A large float32 product on every device at once, and its FLOP."""
    size, times = 2048, 4
    a = jnp.ones((jax.device_count(), size, size)) / size

    def product(a):
        full = jax.lax.Precision.HIGHEST  # as in our programs; a GPU would take TF32
        multiply = functools.partial(jnp.matmul, precision=full)
        return jax.lax.fori_loop(0, times, lambda _, b: multiply(a, b), a)

    mesh = jax.make_mesh((jax.device_count(),), ("d",))
    spec = jax.sharding.PartitionSpec("d")
    placed = jax.device_put(a, jax.sharding.NamedSharding(mesh, spec))
    program = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=spec, out_specs=spec))
    flop = jax.device_count() * times * 2 * size**3
    return lambda: jax.block_until_ready(program(placed)), flop


def side_by_side(runs: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of every run, taken in turn so that a slow spell hits all alike."""
    for run in runs.values():
        run()  # warm up
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    return seconds


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    """How many times faster, round by round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def spread(values: list[float], digits: int = 2) -> str:
    """Median and range, "2.61 (2.55–2.70)"."""
    middle = statistics.median(values)
    return f"{middle:,.{digits}f} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def show(rows: list[dict]) -> None:
    """Prints the machine and a Markdown table."""
    print(f"{machine()}\n\n{files.markdown(rows).rstrip()}")


def parser(description: str, repeats: int) -> argparse.ArgumentParser:
    """The description and the option that all benchmarks have."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--repeats", type=int, default=repeats)
    return made


def in_a_process(module: str, *arguments: str) -> dict:
    """What ``python -m module`` prints as JSON on its last line."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> str:
    """Processor, cores and versions in one line."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            names = [line for line in file if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    versions = []
    for name in ("jax", "jaxlib", "torch"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    cores = os.cpu_count()
    kind = jax.devices()[0].device_kind
    return f"{model}, {cores} cores, {jax.device_count()} JAX device(s) ({kind}); " + (
        ", ".join(versions)
    )
