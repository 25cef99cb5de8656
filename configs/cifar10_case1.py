"""CIFAR-10, Case 1: half of the clients 1 local iteration, half 4.

Reproduces: Table 1 and Fig. 3, 20 clients, VGG11, T = 50.
Paper, best test accuracy in %: FedAvg 63.54, FedProx 63.70, FedAsync 62.68, DMS 64.57.
Time: about 3 hours on 2 cores (estimated from 276 samples/s); GPU not measured.
Run: python launch.py --config=configs/cifar10_case1.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:cifar10_case1")
