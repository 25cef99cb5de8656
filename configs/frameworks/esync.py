"""Synchronous rounds in which faster clients do more iterations.

Reproduces: no table; Li et al., 2020 (ESync),
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 95.83 % at best, 90 % after 16.90 virtual seconds, means of 3 seeds.
Time: about 40 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/esync.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/esync:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {"timeline.framework": "esync", "timeline.local_iterations": 3}
    return replace(config_files.load(f"fleet:{data}"), changes)
