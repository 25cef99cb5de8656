"""``python -m benchmarks.precisions``: how far histories are from those of `highest`.

FedAvg on synthetic images, 20 clients, Case 1 of 256 samples; the largest difference
over the intervals of each metric, of the largest value of `highest`. On a CPU float32
and highest are the same.
"""

import numpy as np

import tsfl_jax
from benchmarks import common


def history(model: str, precision: str, intervals: int) -> dict[str, np.ndarray]:
    """The losses and accuracies of all intervals."""
    work = {"schedule__kind": "case1", "schedule__data_size": 256}
    work |= {"num_intervals": intervals, "precision": precision}
    every = tsfl_jax.simulate(common.make_config(model, **work)).history
    return {k: v for k, v in every.items() if k.endswith(("_loss", "_accuracy"))}


def measure(model: str, precisions: list[str], intervals: int) -> list[dict]:
    """The rows of one network."""
    exact, rows = history(model, "highest", intervals), []
    for precision in precisions:
        row = {"network": model, "precision": precision}
        for name, values in history(model, precision, intervals).items():
            error = np.nanmax(np.abs(values - exact[name]))
            row[name] = f"{error / np.nanmax(np.abs(exact[name])):.1e}"
        rows.append(row)
    return rows


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=1)
    parser.add_argument("--models", nargs="+", default=["mnist_cnn", "fashion_cnn"])
    parser.add_argument("--precisions", nargs="+", default=["float32", "tf32"])
    parser.add_argument("--intervals", type=int, default=10)
    options = parser.parse_args()
    ways = options.precisions, options.intervals
    common.show([row for m in options.models for row in measure(m, *ways)])


if __name__ == "__main__":
    main()
