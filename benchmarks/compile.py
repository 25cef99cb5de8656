"""``python -m benchmarks.compile``: a first launch against a second one.

Every launch is a process of its own. Without: the persistent cache is off; filling: an
empty one is filled; cached: it is used. Tracing and lowering are part of all.
"""

import argparse
import json
import os
import statistics
import tempfile

from benchmarks import common
from tsfl_jax.engine import devices
from tsfl_jax.prepare import custom_hooks, prepare
from tsfl_jax.prepare.backend import start_jax
from tsfl_jax.run import lanes, program

CASES = {
    "MNIST CNN, FedAvg": ("mnist_cnn", "fedavg"),
    "MNIST CNN, DMS": ("mnist_cnn", "dms"),
    "Fashion-MNIST CNN, DMS": ("fashion_cnn", "dms"),
    "VGG11, DMS": ("vgg11", "dms"),
    "ResNet-18, DMS": ("resnet18", "dms"),
    "MNIST CNN, sweep over eight rules": (
        "mnist_cnn",
        "dms fedavg fedprox fedasync fedbuff fednova fedat scaffold",
    ),
}


def compiled(model: str, rules: list[str], cache: str) -> list[program.Compiled]:
    """Every program of an experiment, or of a sweep over several rules."""
    several = {"schedule__kind": "case1", "compile_cache": cache}
    if len(rules) == 1:
        exp = common.make_experiment(model, algorithm=rules[0], **several)
        return [exp.program.compile(exp.arrays)]
    configs = [common.make_config(model, algorithm=r, **several) for r in rules]
    mesh = start_jax(configs[0])
    prepared = prepare.prepare_all(configs, custom_hooks.Custom())
    found = []
    for indices in lanes.group(prepared):
        members = [prepared[i] for i in indices]
        group = lanes.make_group(members, mesh)
        count = lanes.runs_per_call(group)
        arrays = lanes.make_arrays(group, members[:count], estimates=False)
        found.append(group.program.compile(arrays))
    return found


def cpu_seconds() -> float:
    """Of this process, all threads."""
    times = os.times()
    return times.user + times.system


def worker(name: str, cache: str) -> None:
    """Prints the seconds until the programs of one process can start."""
    model, rules = CASES[name]
    found = compiled(model, rules.split(), cache)
    print(
        json.dumps(
            {
                "programs": len(found),
                "trace": sum(c.lower_seconds for c in found),
                "total": sum(c.seconds for c in found),
                "process": cpu_seconds(),
            }
        )
    )


def measure(name: str, repeats: int) -> dict:
    """One row of the table."""
    seconds = {"without": [], "filling": [], "cached": []}
    trace, processes, programs = [], [], 0
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for kind in seconds:
                cache = "off" if kind == "without" else folder
                found = common.in_a_process(
                    "benchmarks.compile", "--worker", name, cache
                )
                seconds[kind].append(found["total"])
                trace.append(found["trace"])
                programs = found["programs"]
                if kind == "without":
                    processes.append(found["process"])
    share = common.ratios(seconds["cached"], seconds["without"])
    return (
        {
            "case": name,
            "programs": programs,
            "of it tracing, s": f"{statistics.median(trace):.1f}",
            "CPU s of the process, without": common.spread(processes, 1),
        }
        | {f"{kind}, s": common.spread(v, 1) for kind, v in seconds.items()}
        | {"cached / without": common.spread(share)}
    )


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--programs", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    devices.start(0)
    if options.worker:
        worker(*options.worker)
        return
    rows = [measure(name, options.repeats) for name in options.programs]
    common.show(rows)


if __name__ == "__main__":
    main()
