"""``python -m benchmarks.clients``: time per sample and memory as clients become many.

MNIST CNN, 64 samples a client, τ = 1, batch 32, FedAvg. Every row in a process of its
own, so that its peak of resident memory (from the first interval on; Linux only) is
its own too; all hold the same images. The rows take turns, `--repeats` rounds; time is
an interval's per sample, the median of the rounds.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

from benchmarks import common
from tsfl_jax.engine import devices

MOST = 10_000  # all rows hold the images that this many clients would need


def worker(clients: int, least: int, most: int) -> None:
    """Prints seconds per sample and peak memory of one process."""
    exp = common.make_experiment(
        "mnist_cnn",
        num_clients=clients,
        data__train_size=64 * most,
        schedule__kind="explicit",
        schedule__tau=(1,),
        schedule__data_size=64,
    )
    run = common.compiled(exp)
    # Making the images takes more memory than training on them: forget that peak.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    run()
    # A short interval is repeated until it has trained as many samples as a long one.
    times = -(-least // clients)
    begun = time.perf_counter()
    for _ in range(times):
        run()
    seconds = (time.perf_counter() - begun) / (times * clients * 64)
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    peak = next(int(s.split()[1]) * 1024 for s in status if s.startswith("VmHWM"))
    table = exp.arrays.problem.rows.nbytes
    print(json.dumps({"seconds": seconds, "peak": peak, "table": table}))


def measure(numbers: list[int], repeats: int) -> list[dict]:
    """The rows of the table."""
    found = {n: [] for n in numbers}
    for _ in range(repeats):
        for n in numbers:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.clients", f"--worker={n}"],
                capture_output=True,
                text=True,
                check=True,
            )
            found[n].append(json.loads(done.stdout.splitlines()[-1]))
    first = found[numbers[0]]
    rows = []
    for n in numbers:
        ratio = [
            a["seconds"] / b["seconds"] for a, b in zip(found[n], first, strict=True)
        ]
        middle = statistics.median(r["seconds"] for r in found[n])
        more = statistics.median(r["peak"] for r in found[n]) - statistics.median(
            r["peak"] for r in first
        )
        rows.append(
            {
                "clients": f"{n:,}",
                "samples/s": f"{1 / middle:,.0f}",
                f"time a sample, of that at {numbers[0]}": common.spread(ratio),
                f"peak memory over that at {numbers[0]}, MiB": f"{more / 2**20:.0f}",
                "index table, MiB": f"{found[n][0]['table'] / 2**20:.1f}",
            }
        )
    return rows


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 200, 2000, MOST])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    devices.start(0)
    if options.worker:
        worker(options.worker, 2000, MOST)
        return
    rows = measure(options.clients, options.repeats)
    print(f"{common.machine()}\n\n{common.table(rows)}")


if __name__ == "__main__":
    main()
