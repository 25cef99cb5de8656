"""``python -m benchmarks.shares``: what frozen work, evaluation and estimates cost.

MNIST CNN, Case 1 of 1,024 samples a client. Frozen: the interval against one in which
every client works τ = 4; Case 1's mean is 2.5, so 0.63 would be free. Evaluation: the
interval with and without 10,000 test images. Estimates: with and without L, G² and σ²
(the paper's DMS), and every client's σ_i² and dissimilarity. Taken in turn in one run.
"""

import argparse
import statistics

from benchmarks import common
from tsfl_jax.engine import devices

SIZE = {"schedule__data_size": 1024}


def measure(repeats: int, clients: int) -> list[dict]:
    """The rows of the table."""
    case1 = common.make_experiment(
        "mnist_cnn", num_clients=clients, schedule__kind="case1", **SIZE
    )
    full = common.make_experiment(
        "mnist_cnn",
        num_clients=clients,
        schedule__kind="explicit",
        schedule__tau=(4,),
        **SIZE,
    )
    # `case1` is FedAvg, which estimates nothing.
    constants, every = (
        common.make_experiment(
            "mnist_cnn", num_clients=clients, schedule__kind="case1", **changes, **SIZE
        )
        for changes in ({"algorithm": "dms"}, {"measure_clients": True})
    )
    runs = {
        "constants": common.compiled(constants),
        "every": common.compiled(every),
        "full": common.compiled(full),
        "case1": common.compiled(case1),
        "evaluated": common.compiled(case1, evaluate=True),
    }
    seconds = common.side_by_side(runs, repeats)
    frozen = common.ratios(seconds["case1"], seconds["full"])

    def extra(more, less):
        pairs = zip(seconds[more], seconds[less], strict=True)
        return [with_ / without - 1 for with_, without in pairs]

    middle = statistics.median(seconds["case1"])
    return [
        {"what": "Case 1 interval, seconds", "median (range)": f"{middle:.2f}"},
        {"what": "Case 1 / all τ = 4", "median (range)": common.spread(frozen)},
        {
            "what": "evaluation / Case 1 interval",
            "median (range)": common.spread(extra("evaluated", "case1"), 3),
        },
        {
            "what": "L, G², σ² / Case 1 interval",
            "median (range)": common.spread(extra("constants", "case1"), 3),
        },
        {
            "what": "these and every client's σ_i², dissimilarity / Case 1 interval",
            "median (range)": common.spread(extra("every", "case1"), 3),
        },
    ]


def main() -> None:
    """Prints the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--devices", type=int, default=0)
    options = parser.parse_args()
    devices.start(options.devices)
    rows = measure(options.repeats, options.clients)
    print(f"{common.machine()}\n\n{common.table(rows)}")


if __name__ == "__main__":
    main()
