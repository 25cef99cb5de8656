"""``python -m benchmarks.peers``: other simulators on the same work, in turns.

A peer is a program of a folder of the user's, run as ``PYTHON PROGRAM --workload NAME
--rounds R …``, which prints one line of JSON with `round_s`, the median of its rounds
in seconds without the first one. Each is given as ``--peer "NAME=PYTHON PROGRAM …"``.
tsfl_jax has a new cohort in every round, too; nothing is evaluated.
"""

import json
import shlex
import statistics
import subprocess
import time
from typing import NamedTuple

import numpy as np
from flax import linen as nn

import tsfl_jax
from benchmarks import common, own
from tsfl_jax.config import Config
from tsfl_jax.engine import devices
from tsfl_jax.run import runner

TABLE = 768 * 2**20  # bytes of samples at most; clients share them where it is full


class Perceptron(nn.Module):
    """Dense layers; no hidden ones: logistic regression."""

    hidden: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x):
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class LeNet(nn.Module):
    """LeNet-5 on color images, with ReLU and maxima."""

    @nn.compact
    def __call__(self, x):
        for filters in (6, 16):
            x = nn.relu(nn.Conv(filters, (5, 5), padding="VALID")(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


class Work(NamedTuple):
    """K of N clients in each round, and what they do."""

    network: nn.Module
    shape: tuple[int, ...]
    clients: int  # N
    cohort: int  # K
    samples: int  # of a client; of skewed sizes the least
    skewed: bool = False  # sizes by a power law, at most five times the least
    passes: int = 1
    batch_size: int = 10
    lr: float = 0.1
    classes: int = 10
    name: str = ""  # what peers call it, "": as here


_CNN, _EMNIST = own.TwoConvolutions(), own.TwoConvolutions(62, True)
_MLP = Work(Perceptron((32,)), (64,), 1000, 100, 50, name="population")
_WIDE = Work(Perceptron((64,)), (784,), 1000, 1000, 20)
WORKLOADS = {
    "population": _MLP,
    "population of 10^6": _MLP._replace(clients=10**6),
    "cifar": Work(_CNN, (32, 32, 3), 1000, 50, 50),
    "emnist": Work(_EMNIST, (28, 28, 1), 3400, 10, 100, True, 1, 20, classes=62),
    "logreg": Work(Perceptron(), (60,), 1000, 10, 30, True, 20, lr=0.01),
    "lr_mnist": Work(Perceptron(), (784,), 1000, 10, 37, True, lr=0.03),
    "lenet": Work(LeNet(), (32, 32, 3), 100, 100, 500, passes=5, batch_size=50),
    # Not of the peers: wide layers, few steps, all clients.
    "wide 64": _WIDE,
    "wide 512": _WIDE._replace(network=Perceptron((512,))),
}


def _held(work: Work, rng: np.random.Generator) -> np.ndarray:
    """Samples of each client."""
    least = np.full(work.clients, work.samples)
    if not work.skewed:
        return least
    grown = work.samples * (1 + rng.pareto(2.5, work.clients))
    return np.minimum(grown, 5 * work.samples).astype(int)


def build(work: Work, rounds: int, present: float, limit: int) -> runner.Experiment:
    """The experiment, whose first call has all rounds; arguments as of the next."""
    rng = np.random.default_rng(0)
    held = _held(work, rng)
    rows = min(int(held.sum()), TABLE // (4 * int(np.prod(work.shape))))
    x = rng.standard_normal((rows, *work.shape), np.float32)
    y = np.arange(rows) % work.classes
    tested = slice(work.classes)
    tau = np.zeros(work.clients, int)
    tau[: round(present * work.clients)] = work.passes
    sampled = work.cohort < work.clients
    settings = {
        "schedule__tau": (work.passes,) if present == 1 else tuple(tau.tolist()),
        "cohort__size": work.cohort if sampled else 0,
        "num_intervals": rounds,
        "report_every": rounds,
        "eval_every": rounds,
        "lr": work.lr,
        "partition__replacement": not work.skewed,
        "devices": limit,
    }
    given, each = None, work.samples
    if work.skewed:
        each = Config().schedule.data_size
        start = held.cumsum() - held
        if held.sum() > rows:
            start = start % (rows - held.max())
        given = [np.arange(a, a + n) for a, n in zip(start, held, strict=True)]
    plain = own.Work(work.network, work.shape, work.clients, each, work.batch_size)
    dataset = tsfl_jax.make_dataset(
        x, y, x[tested], y[tested], num_classes=work.classes
    )
    return runner.build(
        own.config_of(plain, **settings),
        model=work.network,
        dataset=dataset,
        partition=given,
    )


def round_seconds(
    work: Work, rounds: int, present: float, limit: int, calls: int
) -> float:
    """Median seconds of a round of tsfl_jax.

    Args:
      work: what the clients do.
      rounds: intervals of one call.
      present: share of the clients that work.
      limit: devices; 0: as tsfl_jax chooses.
      calls: that are timed.
    """
    run, seconds = common.compiled(build(work, rounds, present, limit)), []
    for _ in range(calls + 1):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:]) / rounds


def peer_seconds(command: str, folder: str, work: str, rounds: int) -> float | None:
    """Median seconds of a round of a peer; None: it failed."""
    found = WORKLOADS[work]
    words = [*shlex.split(command), "--workload", found.name or work]
    words += ["--clients", str(found.clients), "--rounds", str(rounds + 1)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])["round_s"] if lines else None


def measure(options, name: str) -> dict:
    """One row of the table, every program in turn."""
    peers = dict(text.split("=", 1) for text in options.peer)
    found = {"tsfl_jax": [], **{peer: [] for peer in peers}}
    one = [name, "--one", "--rounds", str(options.rounds)]
    one += ["--present", str(options.present), "--devices", str(options.devices)]
    one += ["--calls", str(options.calls)]
    for _ in range(options.repeats):
        ours = common.in_a_process("benchmarks.peers", "--workloads", *one)
        found["tsfl_jax"].append(ours["round_s"])
        for peer, command in peers.items():
            seconds = peer_seconds(command, options.folder, name, options.rounds)
            if seconds is not None:
                found[peer].append(seconds)
    row = {"work, ms per round": name}
    for program, seconds in found.items():
        milliseconds = [1e3 * s for s in seconds]
        row[program] = common.spread(milliseconds) if seconds else "–"
    return row


def main() -> None:
    """Prints the table as Markdown, or with --one a number as JSON."""
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--workloads", nargs="+", default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=3)
    parser.add_argument("--present", type=float, default=1.0)
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    devices.start(options.devices)
    if options.one:
        work, given = WORKLOADS[options.workloads[0]], (options.rounds, options.present)
        seconds = round_seconds(work, *given, options.devices, options.calls)
        print(json.dumps({"round_s": seconds}))
        return
    common.show([measure(options, name) for name in options.workloads])


if __name__ == "__main__":
    main()
