"""The table of all aggregation rules."""

from tsfl_jax.components import section_of
from tsfl_jax.rules import averages, client_memory, dms_rule, robust, server_optimizers
from tsfl_jax.rules.base import Aggregator
from tsfl_jax.rules.bound_optimal import BOUND_OPTIMAL
from tsfl_jax.rules.ca2fl import CA2FL
from tsfl_jax.rules.centered_clipping import CENTERED_CLIPPING
from tsfl_jax.rules.fadas import FADAS
from tsfl_jax.rules.feddyn import FEDDYN
from tsfl_jax.rules.fedexp import FEDEXP
from tsfl_jax.rules.fednova import FEDNOVA
from tsfl_jax.rules.fltrust import FLTRUST
from tsfl_jax.rules.learned import LEARNED
from tsfl_jax.rules.oracle import ORACLE
from tsfl_jax.rules.qfedavg import QFEDAVG
from tsfl_jax.rules.secure_buffer import SECURE_BUFFER

AGGREGATORS: dict[str, Aggregator] = {
    "dms": dms_rule.DMS_RULE,
    "bound_optimal": BOUND_OPTIMAL,
    "fedavg": averages.FEDAVG,
    "fedprox": averages.FEDPROX,
    "fedasync": averages.FEDASYNC,
    "fedbuff": averages.FEDBUFF,
    "secure_buffer": SECURE_BUFFER,
    "aso_fed": client_memory.ASO_FED,
    "safa": client_memory.SAFA,
    "fedat": averages.FEDAT,
    "fednova": FEDNOVA,
    "flexible": averages.FLEXIBLE,
    "scaffold": client_memory.SCAFFOLD,
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
    "dms_adaptive": dms_rule.DMS_ADAPTIVE,
    "learned": LEARNED,
    "feddyn": FEDDYN,
    "fedexp": FEDEXP,
    "qfedavg": QFEDAVG,
    "ca2fl": CA2FL,
    "fadas": FADAS,
    "centered_clipping": CENTERED_CLIPPING,
    "fltrust": FLTRUST,
}

# The settings of all rules by their section.
SECTIONS = {
    section_of(kind): kind for rule in AGGREGATORS.values() for kind in rule.sections
}
