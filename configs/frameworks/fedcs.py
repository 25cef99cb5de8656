"""Synchronous rounds of clients that are expected to meet a deadline.

Reproduces: no table; Nishio and Yonetani, 2019 (FedCS),
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 95.06 % at best, 90 % after 21.69 virtual seconds, means of 3 seeds.
Time: about 27 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/fedcs.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/fedcs:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {
        "timeline.framework": "fedcs",
        "timeline.deadline": 3.0,
        "timeline.local_iterations": 3,
    }
    return replace(config_files.load(f"fleet:{data}"), changes)
