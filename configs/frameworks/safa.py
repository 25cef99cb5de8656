"""Rounds that end with half of the clients; the others may lag 5 versions.

Reproduces: no table; Wu et al., 2021 (SAFA),
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: best test accuracy 95.1 % (seed 0); on the digits see docs/related.md.
Time: about 20 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/safa.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/safa:digits
All: tsfl compare frameworks
"""

from tsfl_jax.studies import experiments


def get_config(data: str = "mnist") -> experiments.Config:
    return experiments.framework("safa", data)
