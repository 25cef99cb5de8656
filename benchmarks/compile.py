"""``python -m benchmarks.compile``: a first launch against a second one.

Every launch is a process of its own. Without: the persistent cache is off; filling: an
empty one is filled; cached: it is used. Tracing and lowering are part of all.
"""

import argparse
import json
import statistics
import tempfile

from benchmarks import common
from tsfl_jax.engine import devices

CASES = {
    "MNIST CNN, FedAvg": ("mnist_cnn", "fedavg"),
    "MNIST CNN, DMS": ("mnist_cnn", "dms"),
    "Fashion-MNIST CNN, DMS": ("fashion_cnn", "dms"),
    "VGG11, DMS": ("vgg11", "dms"),
    "ResNet-18, DMS": ("resnet18", "dms"),
}


def worker(name: str, cache: str) -> None:
    """Prints the seconds until the program of one process can start."""
    model, algorithm = CASES[name]
    exp = common.make_experiment(
        model, algorithm=algorithm, schedule__kind="case1", compile_cache=cache
    )
    compiled = exp.program.compile(exp.arrays)
    print(json.dumps({"trace": compiled.lower_seconds, "total": compiled.seconds}))


def measure(name: str, repeats: int) -> dict:
    """One row of the table."""
    seconds = {"without": [], "filling": [], "cached": []}
    trace = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            for kind in seconds:
                cache = "off" if kind == "without" else folder
                found = common.in_a_process(
                    "benchmarks.compile", "--worker", name, cache
                )
                seconds[kind].append(found["total"])
                trace.append(found["trace"])
    share = common.ratios(seconds["cached"], seconds["without"])
    return (
        {"program": name, "of it tracing, s": f"{statistics.median(trace):.1f}"}
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
