"""``python -m benchmarks.populations``: set-up and rounds of K clients of N.

Who is asked and what they do, for N from 10³ to 10⁷, without a framework, under T-SFL
and under AFL with drawn speeds and jitter. Every row is a process of its own, so that
its peak of resident memory is its own, too; the rows take turns, `--repeats` rounds.
With `--train` an interval is trained as well: logistic regression on synthetic samples.
"""

import argparse
import json
import resource
import statistics
import time

import numpy as np

from benchmarks import common
from tsfl_jax import config as c
from tsfl_jax.config import validate
from tsfl_jax.engine import devices
from tsfl_jax.prepare import workload
from tsfl_jax.run import program, runner

FRAMEWORKS = ("none", "tsfl", "afl")
_RUNS = 7  # of the compiled call, of which the fastest counts


def make_config(clients: int, framework: str, size: int, intervals: int) -> c.Config:
    """K of N clients of about 40 samples, whose speeds differ."""
    settings = {
        "algorithm": "fedavg",
        "num_clients": clients,
        "num_intervals": intervals,
        "cohort.size": min(size, clients),
        "schedule.size_groups": "lognormal(40,0.3)",
        "timeline.framework": framework,
        "data.name": "synthetic",
        "data.shape": (60,),
        "data.train_size": 10_000,
        "partition.kind": "iid",
        "partition.replacement": True,
        "model.hidden": 0,
        "devices": 1,
        "eval_every": intervals,
        "compile_cache": "off",
    }
    if framework != "none":
        settings |= {"timeline.speed": "lognormal(0.2,0.5)", "timeline.jitter": 0.2}
    return c.replace(c.Config(), settings)


def peak() -> int:
    """Bytes of this process's most resident memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def worker(
    clients: int, framework: str, size: int, intervals: int, train: bool
) -> None:
    """Prints what one process needs."""
    # What is imported and filled at the first use is the same for every N.
    workload.draw_workload(make_config(1000, framework, size, 2))
    config = make_config(clients, framework, size, intervals)
    validate(config)
    before, start = peak(), time.perf_counter()
    drawn = workload.draw_workload(config)
    found = {"seconds": time.perf_counter() - start, "memory": peak() - before}
    assert drawn.schedule.client is not None
    found["ever"] = len(np.unique(drawn.schedule.client))
    found["updates"] = len(drawn.schedule.tau)
    if train:
        start = time.perf_counter()
        exp = runner.build(config)
        found["build"] = time.perf_counter() - start
        run = common.compiled(exp)
        run()
        several = []
        for _ in range(_RUNS):
            start = time.perf_counter()
            run()
            several.append(time.perf_counter() - start)
        found["ms"] = 1000 * min(several) / program.chunk_of(exp.prepared)
        found["memory"] = peak() - before
    print(json.dumps(found))


def measure(arguments: argparse.Namespace) -> list[dict]:
    """The rows of the table."""
    cases = [(f, n) for f in FRAMEWORKS for n in arguments.clients]
    found: dict[tuple[str, int], list[dict]] = {case: [] for case in cases}
    for _ in range(arguments.repeats):
        for framework, clients in cases:
            given = [f"--worker={framework}", f"--clients={clients}"]
            given += [f"--size={arguments.size}", f"--intervals={arguments.intervals}"]
            given += ["--train"] * arguments.train
            answer = common.in_a_process("benchmarks.populations", *given)
            found[framework, clients].append(answer)
    rows = []
    for (framework, clients), several in found.items():
        middle = {n: statistics.median(r[n] for r in several) for n in several[0]}
        row = {
            "framework": framework,
            "N": f"{clients:,}",
            "updates": f"{middle['updates']:,}",
            "ever asked": f"{middle['ever']:,}",
            "set-up": f"{middle['seconds']:.2f} s",
            "memory": f"{middle['memory'] / 2**20:,.0f} MiB",
        }
        if arguments.train:
            row |= {
                "build": f"{middle['build']:.2f} s",
                "update": f"{middle['ms']:.2f} ms",
            }
        rows.append(row)
    return rows


def main() -> None:
    """Measures and prints."""
    parser = common.parser(__doc__, repeats=3)
    default = [10**3, 10**4, 10**5, 10**6, 10**7]
    parser.add_argument("--clients", type=int, nargs="+", default=default)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument("--intervals", type=int, default=100)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    devices.start(1)
    if arguments.worker:
        clients, size, intervals = (
            arguments.clients[0],
            arguments.size,
            arguments.intervals,
        )
        worker(clients, arguments.worker, size, intervals, arguments.train)
        return
    common.show(measure(arguments))


if __name__ == "__main__":
    main()
