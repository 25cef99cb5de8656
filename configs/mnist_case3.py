"""MNIST, Case 3: τ and data sizes drawn anew in every interval.

Reproduces: Table 2 and Fig. 5, 20 clients, two-convolution CNN, T = 50.
Paper, best test accuracy in %: FedAvg 98.67, FedProx 98.55, FedAsync 92.97, DMS 99.06.
Time: about 1 minute on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/mnist_case3.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:mnist_case3")
