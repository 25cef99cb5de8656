"""All experiments of the paper in one file, by name: papers.py:mnist_case1.

Reproduces: Tables 1 and 2, Fig. 3 to 7 of Shao et al., 20 clients.
Paper, best test accuracy in %: in the files of the same name, such as mnist_case1.py.
Time: from 1 minute (MNIST) to 20 hours (SVHN) on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/papers.py:mnist_case1 --config.algorithm=fedavg
"""

from tsfl_jax.studies import experiments


def get_config(name: str = "mnist_case1") -> experiments.Config:
    return experiments.paper(name)
