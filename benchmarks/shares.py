"""``python -m benchmarks.shares``: frozen work, evaluation, estimates, no weight.

MNIST CNN, Case 1 of 1,024 samples per client. Frozen: the interval against one in which
every client works τ = 4; Case 1's mean is 2.5, so 0.63 would be free. Evaluation: the
interval with and without 10,000 test images. Estimates: with and without L, G² and σ²
(the paper's DMS), and every client's σ_i² and dissimilarity. Clients without weight:
Cases 1 and 2 under DMS with a coupling c so large that only clients with the largest τ
have weight, with these alone trained and with all. Taken in turn in one run.
"""

import statistics

from benchmarks import common
from tsfl_jax.engine import devices

CASE1 = {"schedule__kind": "case1"}
STRONG = {"algorithm": "dms", "dms__coupling": 10.0}
EXPERIMENTS = {
    "case1": CASE1,  # FedAvg, which estimates nothing
    "full": {"schedule__kind": "explicit", "schedule__tau": (4,)},
    "constants": CASE1
    | {
        "algorithm": "dms",
        "constants__when": "interval",
        "constants__estimator": "quotient",
    },
    "every": CASE1
    | {
        "measure_clients": True,
        "constants__when": "interval",
        "constants__estimator": "quotient",
    },
}
CASES = {"case1": "Case 1", "case2": "Case 2"}
for _case in CASES:
    EXPERIMENTS |= {
        f"{_case}, all": STRONG | {"schedule__kind": _case},
        f"{_case}, some": STRONG | {"schedule__kind": _case, "train_all": False},
    }
EXTRA = {
    "evaluated": "evaluation / Case 1 interval",
    "constants": "L, G², σ² / Case 1 interval",
    "every": "these and every client's σ_i², dissimilarity / Case 1 interval",
}


def measure(repeats: int, clients: int) -> list[dict]:
    """The rows of the table."""
    shared = {"num_clients": clients, "schedule__data_size": 1024}
    built = {
        name: common.make_experiment("mnist_cnn", **settings, **shared)
        for name, settings in EXPERIMENTS.items()
    }
    runs = {name: common.compiled(exp) for name, exp in built.items()}
    runs["evaluated"] = common.compiled(built["case1"], evaluate=True)
    seconds = common.side_by_side(runs, repeats)
    case1 = seconds["case1"]
    found = {
        "Case 1 interval, seconds": f"{statistics.median(case1):.2f}",
        "Case 1 / all τ = 4": common.spread(common.ratios(case1, seconds["full"])),
    }
    for name, what in EXTRA.items():
        more = [ratio - 1 for ratio in common.ratios(seconds[name], case1)]
        found[what] = common.spread(more, 3)
    for case, shown in CASES.items():
        some = common.ratios(seconds[f"{case}, some"], seconds[f"{case}, all"])
        found[f"{shown}, DMS: clients with weight / all"] = common.spread(some)
    return [{"what": k, "median (range)": v} for k, v in found.items()]


def main() -> None:
    """Prints the table as Markdown."""
    parser = common.parser(__doc__, repeats=9)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--devices", type=int, default=0)
    options = parser.parse_args()
    devices.start(options.devices)
    rows = measure(options.repeats, options.clients)
    common.show(rows)


if __name__ == "__main__":
    main()
