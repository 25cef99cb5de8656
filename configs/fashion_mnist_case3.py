"""Fashion-MNIST, Case 3: τ and data sizes drawn anew in every interval.

Reproduces: Table 2 and Fig. 5, 20 clients, six-convolution CNN, T = 100.
Paper, best test accuracy in %: FedAvg 84.26, FedProx 84.61, FedAsync 83.44, DMS 89.84.
Time: about 10 minutes on 2 cores (estimated from 9,670 samples/s); GPU not measured.
Run: python launch.py --config=configs/fashion_mnist_case3.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:fashion_mnist_case3")
