"""Buffered asynchronous FL: an update at every tenth arrival.

Reproduces: no table; Nguyen et al., 2022 (FedBuff), polynomial staleness,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 96.35 % at best, 90 % after 16.04 virtual seconds, means of 3 seeds.
Time: about 32 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/fedbuff.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/fedbuff:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {
        "timeline.framework": "fedbuff",
        "algorithm": "fedbuff",
        "staleness.kind": "polynomial",
        "timeline.local_iterations": 3,
    }
    return replace(config_files.load(f"fleet:{data}"), changes)
