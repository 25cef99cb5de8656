"""T-SFL with FedAvg's weights: whatever fits into an interval is aggregated.

Reproduces: no table; Shao et al.,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 95.81 % at best, 90 % after 16.00 virtual seconds, means of 5 seeds.
Time: about 28 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/tsfl.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/tsfl:digits
All: python -m studies.compare frameworks
"""

from tsfl_jax import config_files


def get_config(data: str = "mnist") -> config_files.Config:
    return config_files.load(f"fleet:{data}")
