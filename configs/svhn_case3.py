"""SVHN (cropped), Case 3: τ and data sizes drawn anew in every interval.

Reproduces: Table 2 and Fig. 5, 20 clients, ResNet-18 with GroupNorm, T = 100.
Paper, best test accuracy in %: FedAvg 88.46, FedProx 88.64, FedAsync 83.05, DMS 90.27.
Time: about 20 hours on 2 cores (estimated from 70 samples/s); GPU not measured.
Run: python launch.py --config=configs/svhn_case3.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:svhn_case3")
