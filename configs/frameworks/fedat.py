"""Tiers of similar speed, each with its own synchronous rounds.

Reproduces: no table; Chai et al., 2021 (FedAT), 3 tiers,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 94.98 % at best, 90 % after 23.77 virtual seconds, means of 3 seeds.
Time: about 39 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/fedat.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/fedat:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {
        "timeline.framework": "fedat",
        "algorithm": "fedat",
        "timeline.local_iterations": 3,
    }
    return replace(config_files.load(f"fleet:{data}"), changes)
