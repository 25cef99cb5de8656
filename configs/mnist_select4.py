"""MNIST, 4-iteration client selection: only τ > 4 may upload.

Reproduces: Table 2 and Fig. 7b, Case 3 computing power and data sizes, T = 50.
Paper, best test accuracy in %: FedAvg 97.11, FedProx 97.46, FedAsync 96.58, DMS 98.59.
Time: about 1 minute on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/mnist_select4.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:mnist_select4")
