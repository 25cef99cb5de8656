"""MNIST, Case 2: quarters with 1, 2, 3, 4 local iterations.

Reproduces: Table 1 and Fig. 4, 20 clients, two-convolution CNN, T = 50.
Paper, best test accuracy in %: FedAvg 97.18, FedProx 97.58, FedAsync 96.73, DMS 98.20.
Time: about 1 minute on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/mnist_case2.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:mnist_case2")
