"""T-SFL with DMS: whatever fits into an interval, weighted by DMS.

Reproduces: no table; Shao et al., Algorithm 1,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 94.30 % at best, 90 % after 31.60 virtual seconds, means of 5 seeds,
with --config.constants.when=interval --config.constants.estimator=quotient.
Time: about 29 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/tsfl_dms.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/tsfl_dms:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files
from tsfl_jax.config import Config, replace


def get_config(data: str = "mnist") -> Config:
    changes = {"algorithm": "dms"}
    return replace(config_files.load(f"fleet:{data}"), changes)
