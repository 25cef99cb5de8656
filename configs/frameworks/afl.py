"""Asynchronous FL: every arrival is an update, old ones count less.

Reproduces: no table; Xie et al., 2019 (FedAsync), polynomial staleness,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 95.54 % at best, 90 % after 19.96 virtual seconds, means of 3 seeds.
Time: about 54 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/afl.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/afl:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {
        "timeline.framework": "afl",
        "algorithm": "fedasync",
        "staleness.kind": "polynomial",
        "timeline.local_iterations": 3,
    }
    return replace(config_files.load(f"fleet:{data}"), changes)
