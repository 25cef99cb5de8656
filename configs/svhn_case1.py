"""SVHN (cropped), Case 1: half of the clients 1 local iteration, half 4.

Reproduces: Table 1 and Fig. 3, 20 clients, ResNet-18 with GroupNorm, T = 100.
Paper, best test accuracy in %: FedAvg 83.08, FedProx 83.38, FedAsync 80.80, DMS 84.70.
Time: about 20 hours on 2 cores (estimated from 70 samples/s); GPU not measured.
Run: python launch.py --config=configs/svhn_case1.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:svhn_case1")
