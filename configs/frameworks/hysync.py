"""What arrives within half a second of a first arrival is one update.

Reproduces: no table; Shi et al., 2020 (HySync), a reading of its abstract,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: best test accuracy 95.4 % (seed 0); on the digits see docs/related.md.
Time: about 25 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/hysync.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/hysync:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {
        "timeline.framework": "hysync",
        "algorithm": "fedasync",
        "staleness.kind": "polynomial",
        "timeline.local_iterations": 3,
    }
    return replace(config_files.load(f"fleet:{data}"), changes)
