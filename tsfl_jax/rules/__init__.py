"""The table of all aggregation rules."""

from tsfl_jax.components import section_of
from tsfl_jax.rules import averages, dms_rule, robust, server_optimizers
from tsfl_jax.rules.adaptive import DMS_ADAPTIVE
from tsfl_jax.rules.aso_fed import ASO_FED
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.bound_optimal import BOUND_OPTIMAL
from tsfl_jax.rules.fednova import FEDNOVA
from tsfl_jax.rules.flexible import FLEXIBLE
from tsfl_jax.rules.learned import LEARNED
from tsfl_jax.rules.oracle import ORACLE
from tsfl_jax.rules.safa import SAFA
from tsfl_jax.rules.scaffold import SCAFFOLD
from tsfl_jax.rules.secure_buffer import SECURE_BUFFER

AGGREGATORS: dict[str, Aggregator] = {
    "dms": dms_rule.RULE,
    "bound_optimal": BOUND_OPTIMAL,
    "fedavg": averages.FEDAVG,
    "fedprox": averages.FEDPROX,
    "fedasync": averages.FEDASYNC,
    "fedbuff": averages.FEDBUFF,
    "secure_buffer": SECURE_BUFFER,
    "aso_fed": ASO_FED,
    "safa": SAFA,
    "fedat": averages.FEDAT,
    "fednova": FEDNOVA,
    "flexible": FLEXIBLE,
    "scaffold": SCAFFOLD,
    "fedavgm": server_optimizers.FEDAVGM,
    "fedadam": server_optimizers.FEDADAM,
    "fedyogi": server_optimizers.FEDYOGI,
    "median": robust.MEDIAN,
    "trimmed_mean": robust.TRIMMED_MEAN,
    "geometric_median": robust.GEOMETRIC_MEDIAN,
    "geometric_mean": robust.GEOMETRIC_MEAN,
    "krum": robust.KRUM,
    "multi_krum": robust.MULTI_KRUM,
    "oracle": ORACLE,
    "dms_adaptive": DMS_ADAPTIVE,
    "learned": LEARNED,
}

# The settings of all rules by their section.
SECTIONS = {
    section_of(kind): kind for rule in AGGREGATORS.values() for kind in rule.sections
}
