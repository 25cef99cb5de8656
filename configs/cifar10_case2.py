"""CIFAR-10, Case 2: quarters with 1, 2, 3, 4 local iterations.

Reproduces: Table 1 and Fig. 4, 20 clients, VGG11, T = 50.
Paper, best test accuracy in %: FedAvg 62.70, FedProx 62.27, FedAsync 61.89, DMS 64.11.
Time: about 3 hours on 2 cores (estimated from 276 samples/s); GPU not measured.
Run: python launch.py --config=configs/cifar10_case2.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:cifar10_case2")
