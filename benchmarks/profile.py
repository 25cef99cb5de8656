"""``python -m benchmarks.profile mnist_cnn``: where the time of an interval goes.

Records one call of the compiled program with JAX's profiler: kernels on a GPU, thunks
on a CPU. Time is a kernel's own, without what it holds; bytes and FLOP are those of
`roofline`, from the compiled HLO. The work is a network of `benchmarks.structure`
(FedAvg, 20 clients × 128 samples, τ = 1) or an experiment (``--config digits_case3``).
On a CPU more than the peak of memory means that arrays are in its caches.
"""

import argparse
import collections
import glob
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common, own, roofline
from tsfl_jax import config_files
from tsfl_jax.run import grid, runner


def own_times(events: Iterable[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """Each event's duration without the events that it holds.

    Args:
      events: (name, start, duration) of one thread or stream.
    """
    times: list[list[Any]] = []
    stack: list[tuple[float, list[Any]]] = []  # (end, entry of `times`)
    for name, start, duration in sorted(events, key=lambda e: (e[1], -e[2])):
        while stack and stack[-1][0] <= start:
            stack.pop()
        if stack:
            stack[-1][1][1] -= duration
        times.append([name, duration])
        stack.append((start + duration, times[-1]))
    return [(name, duration) for name, duration in times]


def record(run: Callable[[], None]) -> tuple[list[tuple[str, float]], float]:
    """(instruction or kernel, own seconds) of all of one call, and its wall time."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            begun = time.perf_counter()
            run()
            wall = time.perf_counter() - begun
        path = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)[0]
        planes = list(jax.profiler.ProfileData.from_file(path).planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    found = []
    for line in (line for plane in gpus or planes for line in plane.lines):
        if gpus and not line.name.startswith("Stream"):
            continue  # the same kernels again, by module or step
        events = []
        for event in line.events:
            name = dict(event.stats).get("hlo_op", event.name if gpus else None)
            if name:
                events.append((str(name), event.start_ns, event.duration_ns))
        found += [(name, 1e-9 * spent) for name, spent in own_times(events)]
    return found, wall


def peaks() -> roofline.Device:
    """Peak rates of this machine: of the data sheet, or measured here."""
    kind = jax.devices()[0].device_kind
    for device in roofline.DEVICES.values():
        if device.name.split()[0] in kind:
            return device
    product, flop = common.matrix_product()
    sweeps, numbers = 8, jnp.ones(2**25)  # in a loop: pages of a new array are slow
    add = jax.jit(lambda a: jax.lax.fori_loop(0, sweeps, lambda _, a: a + 1, a))
    memory = lambda: jax.block_until_ready(add(numbers))  # noqa: E731
    times = common.side_by_side({"product": product, "memory": memory}, 5)
    bandwidth = 2 * sweeps * numbers.nbytes / min(times["memory"])
    flops, count = flop / min(times["product"]), jax.device_count()
    return roofline.Device(f"{kind}, measured", bandwidth / count, flops / count)


def rows(totals: dict[str, roofline.Cost], device: roofline.Device) -> list[dict]:
    """The table: the longest first."""
    every = sum(total.seconds for total in totals.values())
    table = []
    for name, total in sorted(totals.items(), key=lambda item: -item[1].seconds):
        seconds = max(total.seconds, 1e-9)
        gb, tflop = total.bytes / seconds / 1e9, total.flop / seconds / 1e12
        of_memory, of_flop = gb * 1e9 / device.bandwidth, tflop * 1e12 / device.flops
        rate = f"{gb:.3g} GB/s" if of_memory > of_flop else f"{tflop:.3g} TFLOP/s"
        table.append(
            {
                "kernels": name,
                "count": int(total.kernels),
                "ms": f"{1e3 * total.seconds:.3f}",
                "share": f"{total.seconds / every:.3f}",
                "rate": rate if total.bytes else "–",
                "of the peak": f"{max(of_memory, of_flop):.2f}" if total.bytes else "–",
            }
        )
    return table


def profile(run: Callable[[], None], hlo: str, single: bool, most: int) -> None:
    """Prints the table of one call, and how its sum fits the time of a call."""
    device = peaks()
    run()
    begun = time.perf_counter()
    run()
    wall = time.perf_counter() - begun
    costs = roofline.by_name(hlo, device)
    totals: dict[str, roofline.Cost] = collections.defaultdict(roofline.Cost)
    events, recorded = record(run)
    for name, seconds in events:
        computes, cost = costs.get(re.sub(r"\W", "_", name), ("", roofline.Cost()))
        family = re.sub(r"([._]\d+|\.clone)+$", "", name)
        key = f"{name}: {computes}" if single else family
        totals[key] = totals[key].plus(cost._replace(seconds=seconds, kernels=1))
    count, every = jax.device_count(), sum(t.seconds for t in totals.values())
    common.show(rows(totals, device)[:most])
    print(
        f"\n{1e3 * every:.3f} ms in all, {1e3 * every / count:.3f} on each of {count} "
        f"device(s). The call took {1e3 * recorded:.3f} ms, without the profiler "
        f"{1e3 * wall:.3f}. Peaks of one ({device.name}): "
        f"{device.bandwidth / 1e9:,.0f} GB/s, {device.flops / 1e12:.3g} TFLOP/s"
    )


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    networks = [*common.SHAPES, *own.WORK]
    parser.add_argument("network", nargs="?", choices=networks, default="mnist_cnn")
    parser.add_argument("--config", help="an experiment by name, or its file")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--size", type=int, default=128, help="samples per client")
    parser.add_argument("--single", action="store_true", help="no families")
    parser.add_argument("--most", type=int, default=25, help="rows")
    options = parser.parse_args()
    custom: dict[str, Any] = {}
    if options.config:
        config = config_files.load(options.config)
    elif options.network in own.WORK:
        work = own.WORK[options.network]
        work = work._replace(clients=options.clients, samples=options.size)
        config = own.config_of(work)
        custom = {"model": work.network, "dataset": own.data(work)}
    else:
        config = common.make_config(options.network, num_clients=options.clients)
        config.schedule.kind, config.schedule.tau = "explicit", (1,)
        config.schedule.data_size = options.size
    config.report_every = 1
    config = grid.changed(config, grid.parse_settings(options.set))
    exp = runner.build(config, **custom)
    run, compiled = common.first_chunk(exp.program, exp.arrays)
    profile(run, compiled.call.as_text() or "", options.single, options.most)


if __name__ == "__main__":
    main()
