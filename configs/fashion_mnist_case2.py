"""Fashion-MNIST, Case 2: quarters with 1, 2, 3, 4 local iterations.

Reproduces: Table 1 and Fig. 4, 20 clients, six-convolution CNN, T = 100.
Paper, best test accuracy in %: FedAvg 85.23, FedProx 86.45, FedAsync 83.55, DMS 87.47.
Time: about 10 minutes on 2 cores (estimated from 9,670 samples/s); GPU not measured.
Run: python launch.py --config=configs/fashion_mnist_case2.py --config.algorithm=dms
"""

from tsfl_jax import config_files


def get_config() -> config_files.Config:
    return config_files.load("papers:fashion_mnist_case2")
