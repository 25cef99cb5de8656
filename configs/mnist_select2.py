"""MNIST, 2-iteration client selection: only τ > 2 may upload.

Reproduces: Table 2 and Fig. 7a, Case 3 computing power and data sizes, T = 50.
Paper, best test accuracy in %: FedAvg 98.13, FedProx 99.14, FedAsync 97.75, DMS 99.57.
Time: about 1 minute on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/mnist_select2.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:mnist_select2")
