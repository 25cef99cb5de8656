"""``python -m benchmarks.peers``: other simulators on the same work, in turns.

A peer is a program of a folder of the user's, run as ``PYTHON PROGRAM --workload NAME
--rounds R …``, which prints one line of JSON with `round_s`, the median of its rounds
in seconds without the first one. Each is given as ``--peer "NAME=PYTHON PROGRAM …"``.
tsfl_jax trains the K clients of a round; nothing is sampled and nothing evaluated.
"""

import json
import shlex
import statistics
import subprocess
import time

import numpy as np
from flax import linen as nn

import tsfl_jax
from benchmarks import common, own
from tsfl_jax.engine import devices
from tsfl_jax.experiment import runner


class Perceptron(nn.Module):
    """Dense layers; no hidden ones: logistic regression."""

    hidden: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x):
        for width in self.hidden:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


WORKLOADS = {
    "population": own.Work(Perceptron((32,)), (64,), 100),
    "cifar": own.WORK["CNN"],
    "lr_mnist": own.Work(Perceptron(), (784,), samples=61),
    # Not of the peers: wide layers, few steps.
    "wide 64": own.Work(Perceptron((64,)), (784,), 1000, 20),
    "wide 512": own.Work(Perceptron((512,)), (784,), 1000, 20),
}


def round_seconds(work: own.Work, rounds: int, present: float, limit: int) -> float:
    """Median seconds of one interval of tsfl_jax.

    Args:
      work: what the clients do.
      rounds: intervals that are timed, each a call of its own.
      present: share of the clients that work.
      limit: devices; 0: as tsfl_jax chooses.
    """
    rng, number = np.random.default_rng(0), work.clients * work.samples
    x = rng.standard_normal((number, *work.shape)).astype(np.float32)
    y = np.arange(number) % 10
    tau = np.zeros(work.clients, int)
    tau[: round(present * work.clients)] = 1
    config = own.config_of(work, schedule__tau=tuple(tau.tolist()), devices=limit)
    dataset = tsfl_jax.make_dataset(x, y, x[:10], y[:10])
    exp = runner.build(config, model=work.network, dataset=dataset)
    run, seconds = common.compiled(exp), []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[1:])


def peer_seconds(command: str, folder: str, name: str, rounds: int) -> float | None:
    """Median seconds of a round of a peer; None: it failed."""
    words = [*shlex.split(command), "--workload", name, "--rounds", str(rounds + 1)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])["round_s"] if lines else None


def measure(options, name: str) -> dict:
    """One row of the table, every program in turn."""
    peers = dict(text.split("=", 1) for text in options.peer)
    found = {"tsfl_jax": [], **{peer: [] for peer in peers}}
    one = [name, "--one", "--rounds", str(options.rounds)]
    one += ["--present", str(options.present), "--devices", str(options.devices)]
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
    parser.add_argument("--present", type=float, default=1.0)
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    devices.start(options.devices)
    if options.one:
        work, given = WORKLOADS[options.workloads[0]], (options.rounds, options.present)
        print(json.dumps({"round_s": round_seconds(work, *given, options.devices)}))
        return
    common.show([measure(options, name) for name in options.workloads])


if __name__ == "__main__":
    main()
