"""Rounds in which half of the clients upload; the others keep what they have trained.

Reproduces: no table; Hao et al., 2020, a reading of its abstract,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: best test accuracy 94.3 % (seed 0); on the digits see docs/related.md.
Time: about 15 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/cached.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/cached:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {"timeline.framework": "cached", "timeline.local_iterations": 3}
    return replace(config_files.load(f"fleet:{data}"), changes)
