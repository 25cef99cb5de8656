"""tsfl_jax: time-driven synchronous federated learning, vectorized in JAX.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning: Analysis
and Optimizations". The symbols are explained in `tsfl_jax.types`.
"""

from tsfl_jax.config import Config
from tsfl_jax.data.in_memory import make_dataset
from tsfl_jax.experiment.runner import Result, simulate
from tsfl_jax.experiment.sweeps import SweepResult, sweep
from tsfl_jax.models.networks import Model
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator, Situation, Weights
from tsfl_jax.rules.dms import (
    affine_weights,
    coupling,
    dms_weights,
    filter_probability,
    project,
    select,
    threshold,
)
from tsfl_jax.theory.bounds import BoundConstants, theorem1_bound, theorem4_bound
from tsfl_jax.theory.fixed_point import theorem2_weights
from tsfl_jax.theory.minimum import bound_optimal_weights, kkt_residual
from tsfl_jax.types import Dataset, HParams, UserError

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "BoundConstants",
    "Config",
    "Dataset",
    "HParams",
    "Model",
    "Result",
    "Situation",
    "SweepResult",
    "UserError",
    "Weights",
    "affine_weights",
    "bound_optimal_weights",
    "coupling",
    "dms_weights",
    "filter_probability",
    "kkt_residual",
    "make_dataset",
    "project",
    "select",
    "simulate",
    "sweep",
    "theorem1_bound",
    "theorem2_weights",
    "theorem4_bound",
    "threshold",
]
