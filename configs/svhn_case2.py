"""SVHN (cropped), Case 2: quarters with 1, 2, 3, 4 local iterations.

Reproduces: Table 1 and Fig. 4, 20 clients, ResNet-18 with GroupNorm, T = 100.
Paper, best test accuracy in %: FedAvg 83.51, FedProx 83.71, FedAsync 80.74, DMS 84.76.
Time: about 20 hours on 2 cores (estimated from 70 samples/s); GPU not measured.
Run: python launch.py --config=configs/svhn_case2.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:svhn_case2")
