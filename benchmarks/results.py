"""Digests of results, to show that a change of form leaves every bit as it was.

``python -m benchmarks.results --save FILE`` before a change, ``--check FILE`` after it,
on the same machine and versions: all rules, two networks, a sweep and all timelines.
``--only NAME …`` restricts it to the cases whose name contains one of the words.
"""

import argparse
import hashlib
import json
import pathlib
import sys

import jax
import numpy as np

import tsfl_jax
from benchmarks import common

RULES = sorted(tsfl_jax.AGGREGATORS)
FRAMEWORKS = ("tsfl", "sfl", "afl", "fedbuff", "fedat", "fedcs", "esync", "safa")


def digest(*trees) -> str:
    """SHA-256 of the arrays of some trees, with dtypes and shapes."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        array = np.asarray(leaf)
        found.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:16]


def small(**settings) -> tsfl_jax.Config:
    """A few intervals of digits, seven clients; settings by name, ``data__name``."""
    config = tsfl_jax.Config(num_intervals=4, num_clients=7, batch_size=8, lr=0.03)
    config.report_every, config.schedule.data_size = 2, 40
    return common.changed(config, settings)


def cases() -> dict[str, tsfl_jax.Config]:
    """Every experiment by name."""
    found = {f"rule {rule}": small(algorithm=rule) for rule in RULES}
    for network in ("mnist_cnn", "fashion_cnn"):
        found[f"network {network}"] = small(
            model__name=network,
            data__name="synthetic",
            data__train_size=512,
            data__test_size=128,
        )
    found["mapping vmap"] = small(mapping="vmap", client_block=3)
    for framework in FRAMEWORKS:
        config = small(algorithm="fedavg", timeline__framework=framework)
        config.num_intervals = 8
        if framework == "fedbuff":
            config.timeline.buffer = 3
        if framework == "fedat":
            config.timeline.tiers = 2
        config.timeline.jitter = 0.1
        found[f"timeline {framework}"] = config
    config = small(algorithm="scaffold", timeline__framework="fedbuff")
    config.num_intervals = 8
    config.timeline.buffer = 3
    found["scaffold under fedbuff"] = config
    found["free riders"] = small(schedule__free_riders=2)
    found["measured clients"] = small(measure_clients=True)
    return found


def wanted(name: str, only: list[str]) -> bool:
    """Whether a case was asked for: its name contains one of the words, if any."""
    return not only or any(word in name for word in only)


def measure(only: list[str]) -> dict[str, str]:
    """Digest of the final model and the history of every case, and of one sweep."""
    found = {}
    for name, config in cases().items():
        if not wanted(name, only):
            continue
        result = tsfl_jax.simulate(config)
        history = {k: result.history[k] for k in sorted(result.history)}
        found[name] = digest(result.params, history)
        print(f"{name}: {found[name]}", file=sys.stderr)
    if not wanted("sweep", only):
        return found
    swept = {"algorithm": ["dms", "fedavg"], "seed": range(2), "lr": [0.01, 0.03]}
    history = tsfl_jax.sweep(small(), swept).history
    found["sweep"] = digest({k: history[k] for k in sorted(history)})
    return found


def main(arguments: list[str]) -> None:
    """Saves the digests, or reports which have changed and exits with 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=pathlib.Path)
    parser.add_argument("--check", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    given = parser.parse_args(arguments)
    found = measure(given.only)
    if not found:
        sys.exit(f"--only {' '.join(given.only)}: no case has such a name")
    if given.save:
        given.save.write_text(json.dumps(found, indent=1) + "\n")
    if given.check:
        old = json.loads(given.check.read_text())
        old = {name: bits for name, bits in old.items() if wanted(name, given.only)}
        changed = [name for name in found | old if found.get(name) != old.get(name)]
        print(f"{len(found) - len(changed)} of {len(found)} equal to the bit")
        if changed:
            sys.exit(f"changed: {', '.join(changed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
