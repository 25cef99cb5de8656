"""Buffered asynchronous FL: an update at every tenth arrival.

Reproduces: no table; Nguyen et al., 2022 (FedBuff), polynomial staleness,
on the clients that all files of this folder share: MNIST, 20 clients, 512 samples each,
0.25 to 1 s per iteration, 0.1 s per transfer, 80 virtual seconds.
Expected: 96.35 % at best, 90 % after 16.04 virtual seconds, means of 3 seeds.
Time: about 32 seconds on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/frameworks/fedbuff.py
Without MNIST, on scikit-learn's digits: tsfl run --config=frameworks/fedbuff:digits
All: tsfl compare frameworks
"""

from tsfl_jax.studies import experiments


def get_config(data: str = "mnist") -> experiments.Config:
    return experiments.framework("fedbuff", data)
