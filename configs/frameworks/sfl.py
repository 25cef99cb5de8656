"""Conventional synchronous FL: every round waits for the slowest of H iterations.

Reproduces: no table; McMahan et al., 2017 (FedAvg),
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 94.97 % at best, 90 % after 22.99 virtual seconds, means of 5 seeds.
Time: about 20 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/sfl.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/sfl:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {"timeline.framework": "sfl", "timeline.local_iterations": 3}
    return replace(config_files.load(f"fleet:{data}"), changes)
