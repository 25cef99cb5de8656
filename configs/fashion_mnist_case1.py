"""Fashion-MNIST, Case 1: half of the clients 1 local iteration, half 4.

Reproduces: Table 1 and Fig. 3, 20 clients, six-convolution CNN, T = 100.
Paper, best test accuracy in %: FedAvg 87.15, FedProx 88.19, FedAsync 86.09, DMS 89.52.
Time: about 10 minutes on 2 cores (estimated from 9,670 samples/s); GPU not measured.
Run: python launch.py --config=configs/fashion_mnist_case1.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:fashion_mnist_case1")
