"""Every setting as one of a sweep: each run is the single run with its value.

The settings and their values are generated from their declarations. A program that took
a setting from the first of its runs would give the others that value.
"""

import hashlib
import importlib.util
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest

import tsfl_jax
from tsfl_jax import config
from tsfl_jax.config import READERS, SETTINGS
from tsfl_jax.prepare.prepare import prepare_all
from tsfl_jax.run import lanes
from tsfl_jax.types import UserError

BASIC = config.Config()
TABLES = ("schedule.trace", "timeline.speeds", "timeline.availability")  # CSV files
ONLINE = "client,start,end\n1,0,12\n1,20,inf\n"
BASE = {
    "algorithm": "fedavg",
    "num_intervals": 3,
    "num_clients": 5,
    "lr": 0.1,
    "batch_size": 8,
    "eval_every": 1,
    "devices": 1,
    "mapping": "sequential",
    "schedule.data_size": 16,
    "schedule.kind": "case2",
    "schedule.interval_seconds": 10.0,
    "data.train_size": 300,
    "data.test_size": 100,
    "model.hidden": 4,
}
# Data sets and parameters in files and on servers, tested where these are read.
FILES = {"data.dir", "data.file", "data.download", "data.columns", "data.tokens"}
FILES |= {"data.length", "data.vocabulary", "model.params"}
OTHERS = {"stop.at", "stop.patience"}  # refused in every sweep
OTHERS |= {"model.name", "model.norm"}  # of large networks
if importlib.util.find_spec("dp_accounting") is None:
    OTHERS |= {name for name in SETTINGS if name.startswith("noise.")}
SWEPT = [
    name
    for name, (_, known) in SETTINGS.items()
    if known.swept and name not in FILES | OTHERS
]
# What a setting needs beside the first that reads it.
COMPANIONS: dict[str, dict[str, Any]] = {
    "measure_regret": {"data.validation": 30},
    "client_block": {"mapping": "vmap"},
    "lr_every": {"lr_schedule": "steps"},
    "partition.common": {"partition.iid_share": 0.5},
    "partition.least_size": {
        "partition.kind": "class_dirichlet",
        "schedule.data_size": BASIC.schedule.data_size,
    },
    "schedule.tau": {"schedule.kind": "explicit", "schedule.tau": (2,)},
    "schedule.tau_groups": {
        "schedule.kind": "distribution",
        "schedule.tau_groups": "constant(2)",
    },
    "schedule.trace": {
        "schedule.kind": "trace",
        "schedule.trace": "interval,client,tau\n0,0,1\n2,1,3\n",
    },
    "timeline.buffer": {"timeline.framework": "fedbuff", "timeline.buffer": 2},
    "cohort.size": {},
    "cohort.candidates": {"cohort.size": 2, "cohort.sampler": "power_of_choice"},
    "cohort.preferred": {"cohort.size": 2, "cohort.sampler": "oort"},
    "cohort.ask": {"cohort.size": 2, "timeline.framework": "sfl"},
    "evaluation.number": {"evaluation.clients": "labels"},
    "model.local": {"evaluation.clients": "labels"},
    "model.local_period": {"evaluation.clients": "labels", "model.local": "Dense_1"},
    "dms.threshold": {"algorithm": "dms", "schedule.upload_above": 1},
    "dms.drop_late": {"algorithm": "dms", "dms.late": 1},
    "dms.coupling_late": {"algorithm": "dms", "dms.late": 1},
    "data.shape": {"data.name": "synthetic", "data.num_classes": 3},
}
TIERS = {"cohort.size": 2, "cohort.sampler": "tifl", "timeline.framework": "sfl"}
TIERS |= {"cohort.tiers": 2}
COMPANIONS |= {f"cohort.{n}": TIERS for n in ("tiers", "tier_chances", "tier_credits")}
COMPANIONS["clip.rate"] = {"uplink.chain": "clip", "clip.quantile": 0.5}
for name in SETTINGS:
    if name.startswith("noise."):
        COMPANIONS[name] = {"uplink.chain": "clip,noise"}
    if name.partition(".")[0] in ("oracle", "dms_adaptive"):
        COMPANIONS[name] = {"algorithm": name.partition(".")[0], "data.validation": 30}
COMPANIONS["timeline.online_from"] = {
    **{"timeline.framework": "afl", "algorithm": "fedasync"},
    "timeline.online": "uniform(8,20)",
}
COMPANIONS |= dict.fromkeys(
    (name for name in SETTINGS if name.startswith("quadratic.")),
    {"data.name": "quadratic", "model.name": "quadratic", "data.shape": (3,)}
    | dict.fromkeys(("data.train_size", "data.test_size"), 0)
    | {"model.hidden": BASIC.model.hidden},
)
# Values of settings that are texts or tuples, and where the next number says nothing.
VALUES: dict[str, Any] = {
    "batch_size": 5,
    "constants.smoothness": 2.0,
    "constants.grad_sq_norm": 2.0,
    "constants.grad_variance": 2.0,
    "data.name": "synthetic",
    "data.shape": (4, 4, 1),
    "data.validation": 30,
    "schedule.tau": (1, 2),
    "schedule.tau_groups": "uniform(1,5)",
    "schedule.size_groups": "constant(8); constant(20)",
    "schedule.kind": "case1",
    "schedule.trace": "interval,client,tau\n0,1,2\n1,3,2\n",
    "timeline.speed": "uniform(0.5,1)",
    "timeline.download": "constant(0.1)",
    "timeline.upload": "constant(0.1)",
    "timeline.jitter": 0.5,
    "timeline.speeds": "client,seconds\n0,0.2\n1,0.5\n2,1\n3,0.1\n4,0.3\n",
    "timeline.availability": ONLINE,
    "timeline.online": "uniform(8,20)",
    "timeline.online_from": "uniform(-1,0)",
    "timeline.copula": "seconds rarity 0.8",
    "timeline.bandwidth_down": "constant(1e4)",
    "timeline.bandwidth_up": "constant(1e4)",
    "timeline.power": "5,1.5,0.5",
    "model.frozen": "Dense_0",
    "model.local": "Dense_1",
    "uplink.chain": "topk",
    "constants.when": "interval",
    "evaluation.clients": "labels",
    "dms.weight_limit": 2.0,
    "bound_optimal.weight_limit": 2.0,
    "quadratic.convexity": 0.5,
    "quadratic.grad_variance": "constant(2)",
    "quadratic.dissimilarity": "constant(2)",
    "cohort.size": 2,
    "cohort.candidates": 4,
    "cohort.ask": 3,
    "cohort.tier_chances": (1, 3),
    "cohort.tier_credits": (1, 5),
    "partition.kind": "iid",
    "noise.epsilon": 5.0,
}


def value_of(name: str, settings: dict[str, Any]) -> Any:
    """Another value than that of the settings, within the declared range."""
    kind, known = SETTINGS[name]
    value = settings.get(name, config.get(BASIC, name))
    if name in VALUES:
        return VALUES[name]
    if known.choices:
        return next(n for n in reversed([*known.choices]) if n != value)
    if kind is bool:
        return not value
    if kind is int:
        return value + 1
    high = min(known.high, known.below)
    if known.low == known.above:  # any number
        return value + 1.0
    middle = (value + high) / 2 if high < np.inf else 1.5 * value
    return middle if middle != value else (value + max(known.low, known.above)) / 2


def companions_of(name: str) -> dict[str, Any]:
    """Settings with which a setting is read, of the first component that reads it."""
    if name in COMPANIONS:
        return COMPANIONS[name]
    settings: dict[str, Any] = {}
    for by, values in READERS.get(name, {}).items():
        settings |= companions_of(by)
        if not values:
            settings[by] = value_of(by, settings)
        elif settings.get(by, BASE.get(by, config.get(BASIC, by))) not in values:
            settings[by] = values[0]
    return settings


def written(point: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """A point whose tables are in files."""
    for name in TABLES:
        if name in point:
            path = folder / f"{hashlib.sha256(point[name].encode()).hexdigest()}.csv"
            path.write_text(point[name])
            point = point | {name: str(path)}
    return point


def joint(base: config.Config, first: dict, changes: list[tuple]) -> list[dict]:
    """As few points as possible with all changes that leave a run in its program."""
    point = first | dict(changes)
    try:
        runs = prepare_all([config.replace(base, p) for p in (first, point)])
        if len(lanes.group(runs)) == 1:
            return [point]
    except UserError:
        pass  # two changes do not go together
    half = len(changes) // 2
    parts = (changes[:half], changes[half:]) if half else ()
    return [point for part in parts for point in joint(base, first, part)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> list[list[dict[str, Any]]]:
    """Points that share a program: companions alone, and with settings changed."""
    folder, base = tmp_path_factory.mktemp("tables"), config.replace(BASIC, BASE)
    cases: dict[str, tuple[dict, list]] = {}
    for name in SWEPT:
        first = companions_of(name)
        changes = written({name: value_of(name, BASE | first)}, folder)
        first = written(first, folder)
        cases.setdefault(str(first), (first, []))[1].extend(changes.items())
    points = []
    for first, changes in cases.values():
        # Few at once, so that none hides what another one does.
        parts = (changes[i : i + 4] for i in range(0, len(changes), 4))
        points += [first, *itertools.chain(*(joint(base, first, c) for c in parts))]
    groups = lanes.group(prepare_all([config.replace(base, p) for p in points]))
    shared = [
        [points[i] for i in (group[0], *group[k : k + 20])]
        for group in groups
        for k in range(1, len(group), 20)
    ]
    assert len({name for point in itertools.chain(*shared) for name in point}) > 60
    return shared


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_run_of_a_sweep_is_the_single_run(programs, part):
    """The first of a program would give the others its settings."""
    base, histories = config.replace(BASIC, BASE), {}
    groups = programs[part::4]
    points = list(itertools.chain(*groups))
    tsfl_jax.sweep(base, points, watch=histories.update)
    later = [run > 0 for group in groups for run in range(len(group))]
    for run, point in itertools.compress(enumerate(points), later):
        single = tsfl_jax.simulate(config.replace(base, point)).history
        swept = histories[run] | {"samples": histories[run]["samples"].sum(axis=1)}
        assert {*swept} - {"seconds", "tau"} == {*single}
        for name, values in single.items():
            message = f"{point} {name}"
            np.testing.assert_array_equal(swept[name], values, err_msg=message)
