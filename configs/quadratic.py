"""Every client its own quadratic, all constants of Theorem 1 known exactly.

Reproduces: nothing; for what weights do where w*, Γ, σ², G² and L need no estimate.
The test loss is F(w) − F(w*); clients with 1 and with 4 iterations pull in opposite
directions, so that every rule but uniform work ends beside w*.
Expected: TODO
Time: TODO 5
Run: python launch.py --config=configs/quadratic.py
"""

from tsfl_jax.config import Config


def get_config() -> Config:
    config = Config()
    config.algorithm = "dms"  # or fedavg, fedprox, fednova, …
    config.num_intervals = 50
    config.num_clients = 10
    config.lr = 0.1  # η <= 1/L keeps every iterate among w⁰ and the samples
    config.momentum = 0.0
    config.batch_size = 8
    config.data.name = "quadratic"
    config.data.shape = (8,)
    config.quadratic.smoothness = 1.0
    config.quadratic.convexity = 0.1
    config.quadratic.grad_variance = "constant(0.5)"
    config.quadratic.dissimilarity = "constant(1)"
    config.quadratic.distance = 4.0
    config.partition.kind = "label"
    config.schedule.kind = "case1"
    config.schedule.data_size = 64
    config.schedule.iteration = "step"
    config.model.name = "quadratic"
    return config
