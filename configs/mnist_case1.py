"""MNIST, Case 1: half of the clients 1 local iteration, half 4.

Reproduces: Table 1 and Fig. 3, 20 clients, two-convolution CNN, T = 50.
Paper, best test accuracy in %: FedAvg 96.41, FedProx 97.01, FedAsync 96.17, DMS 97.89.
Time: about 1 minute on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/mnist_case1.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:mnist_case1")
