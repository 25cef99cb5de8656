"""Rounds that end with half of the clients; the others may lag 5 versions.

Reproduces: no table; Wu et al., 2021 (SAFA),
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: best test accuracy 95.1 % (seed 0); on the digits see docs/related.md.
Time: about 20 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/safa.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/safa:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {
        "timeline.framework": "safa",
        "algorithm": "safa",
        "timeline.local_iterations": 3,
    }
    return replace(config_files.load(f"fleet:{data}"), changes)
