"""An update every Δ of the tasks that have ended; slower clients are versions behind.

Reproduces: no table; Zhou et al., 2022 (TT-Fed), Δ of 2 s,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: not measured on MNIST; on the digits see docs/related.md.
Time: about a minute on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/ttfed.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/ttfed:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {"timeline.framework": "ttfed", "timeline.local_iterations": 3}
    return replace(config_files.load(f"fleet:{data}"), changes)
