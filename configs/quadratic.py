"""Every client its own quadratic, all constants of Theorem 1 known exactly.

Reproduces: nothing; for what a rule does where w*, Γ, σ², G² and L are no estimates
(`network.exact_of`). The test loss is F(w) − F(w*); clients with 1 and with 4
iterations pull in opposite directions, so that many rules end beside w*.
Expected: test loss after 50 intervals, mean of seeds 0 to 4 (range): dms 0.096 (0.052
to 0.142), fedasync 0.055, fedavg 0.045 (0.022 to 0.070), fednova 0.004.
Time: about 10 seconds on 2 CPU cores, compilation included.
Run: python launch.py --config=configs/quadratic.py
"""

from tsfl_jax.config import Config, replace

CLIENTS = {
    "algorithm": "dms",  # or fedavg, fedprox, fednova, …
    "num_intervals": 50,
    "num_clients": 10,
    "lr": 0.1,  # η <= 1/L keeps every iterate among w⁰ and the samples
    "momentum": 0.0,
    "batch_size": 8,
    "data.name": "quadratic",
    "data.shape": (8,),
    "quadratic.smoothness": 1.0,
    "quadratic.convexity": 0.1,
    "quadratic.grad_variance": "constant(0.5)",
    "quadratic.dissimilarity": "constant(1)",
    "quadratic.distance": 4.0,
    "partition.kind": "label",
    "schedule.kind": "case1",
    "schedule.data_size": 64,
    "schedule.iteration": "step",
    "model.name": "quadratic",
}


def get_config() -> Config:
    return replace(Config(), CLIENTS)
