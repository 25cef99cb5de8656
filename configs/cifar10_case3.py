"""CIFAR-10, Case 3: τ and data sizes drawn anew in every interval.

Reproduces: Table 2 and Fig. 5, 20 clients, VGG11, T = 50.
Paper, best test accuracy in %: FedAvg 68.07, FedProx 69.21, FedAsync 65.97, DMS 70.29.
Time: about 3 hours on 2 cores (estimated from 276 samples/s); GPU not measured.
Run: python launch.py --config=configs/cifar10_case3.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:cifar10_case3")
