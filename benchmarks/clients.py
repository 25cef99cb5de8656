"""``python -m benchmarks.clients``: time per sample and memory as clients become many.

MNIST CNN, 64 samples per client, τ = 1, batch 32, FedAvg. Each row is measured in a
process of its own, so that its peak of resident memory (from the first interval on;
Linux only) is its own too; all hold the same images. The rows take turns, `--repeats`
rounds; time is an interval's per sample, the median of the rounds.
"""

import argparse
import json
import pathlib
import statistics
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
            found[n].append(common.in_a_process("benchmarks.clients", f"--worker={n}"))
    seconds = {n: [r["seconds"] for r in rows] for n, rows in found.items()}
    peaks = {n: statistics.median(r["peak"] for r in found[n]) for n in numbers}
    first, rows = numbers[0], []
    for n in numbers:
        more = peaks[n] - peaks[first]
        ratio = common.ratios(seconds[n], seconds[first])
        rows.append(
            {
                "clients": f"{n:,}",
                "samples/s": f"{1 / statistics.median(seconds[n]):,.0f}",
                f"time per sample, of that at {first}": common.spread(ratio),
                f"peak memory over that at {first}, MiB": f"{more / 2**20:.0f}",
                "index table, MiB": f"{found[n][0]['table'] / 2**20:.1f}",
            }
        )
    return rows


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 200, 2000, MOST])
    parser.add_argument("--worker", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    devices.start(0)
    if options.worker:
        worker(options.worker, 2000, MOST)
        return
    rows = measure(options.clients, options.repeats)
    common.show(rows)


if __name__ == "__main__":
    main()
