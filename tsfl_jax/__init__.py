"""tsfl_jax: time-driven synchronous federated learning, vectorized in JAX.

Shao et al., "Robust Model Aggregation for Heterogeneous Federated Learning: Analysis
and Optimizations". The symbols are explained in `tsfl_jax.types`. The names:

  Settings       Config, HParams, UserError
  Running        simulate, sweep, explain, predict, as_function, Writer, Result,
                 SweepResult, Explanation
  Data, models   make_dataset, Dataset, Model
  Own parts      register, component, setting
  Own rules      rule, init_rule, aggregate, weights, Aggregator,
                 RoundInfo, ClientOutputs, Received, Weights, Counts, AGGREGATORS, rules
  DMS            dms, dms_weights, affine_weights, coupling, filter_probability
  Theory         theory, BoundConstants, bound_optimal_weights, kkt_residual,
                 theorem1_bound, theorem2_weights, theorem4_bound

Timelines without training are in `tsfl_jax.timeline`, tables and figures in
`tsfl_jax.report`. The command line: ``tsfl --help``.
"""

from tsfl_jax import rules, theory
from tsfl_jax.components import component, setting
from tsfl_jax.config import Config
from tsfl_jax.data.in_memory import make_dataset
from tsfl_jax.models.networks import Model
from tsfl_jax.registry import load_installed, register
from tsfl_jax.report.writers import Writer
from tsfl_jax.rules import AGGREGATORS, dms
from tsfl_jax.rules.base import (
    Aggregator,
    ClientOutputs,
    Counts,
    Received,
    RoundInfo,
    Weights,
)
from tsfl_jax.rules.custom import aggregate, init_rule, rule, weights
from tsfl_jax.rules.dms import (
    affine_weights,
    coupling,
    dms_weights,
    filter_probability,
)
from tsfl_jax.run.doors import as_function, predict, simulate, sweep
from tsfl_jax.run.explain import Explanation, explain
from tsfl_jax.run.runner import Result
from tsfl_jax.run.sweeps import SweepResult
from tsfl_jax.theory import (
    BoundConstants,
    bound_optimal_weights,
    kkt_residual,
    theorem1_bound,
    theorem2_weights,
    theorem4_bound,
)
from tsfl_jax.types import Dataset, HParams, UserError

__version__ = "0.3.0"

load_installed()

__all__ = ["Config", "HParams", "UserError"]
__all__ += ["simulate", "sweep", "explain", "predict", "as_function"]
__all__ += ["Writer", "Result", "SweepResult", "Explanation"]
__all__ += ["make_dataset", "Dataset", "Model"]
__all__ += ["register", "component", "setting"]
__all__ += ["rule", "init_rule", "aggregate", "weights"]
__all__ += ["Aggregator", "RoundInfo", "ClientOutputs", "Received", "Weights", "Counts"]
__all__ += ["AGGREGATORS", "rules", "dms"]
__all__ += ["dms_weights", "affine_weights", "coupling", "filter_probability"]
__all__ += ["theory", "BoundConstants", "bound_optimal_weights", "kkt_residual"]
__all__ += ["theorem1_bound", "theorem2_weights", "theorem4_bound"]
