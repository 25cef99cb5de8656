"""An experiment has one result, however it is run.

Stopped and resumed, with more intervals later, as a run of a sweep, on two devices or
in other calls: each kind of experiment in each way against one whole run of it.
"""

import jax
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.problems import small
from tsfl_jax.config import replace

COHORT = {
    "algorithm": "fedavg",
    "num_clients": 300,
    "cohort__size": 3,
    "partition__kind": "iid",
    "partition__replacement": True,
    "schedule__dropout": 0.1,
    "schedule__data_size": 24,
    "schedule__size_groups": "uniform(12,24)",
}
CHOOSING = COHORT | {
    "num_clients": 20,
    "cohort__candidates": 7,
    "cohort__sampler": "power_of_choice",
}
CHOSEN = ["power_of_choice", "oort"]
# Sizes that are the same in all intervals: the split does not depend on T.
EVEN = {"schedule__kind": "distribution", "schedule__tau_groups": "uniform(1,4)"}
KINDS = {
    "fedavg": {"algorithm": "fedavg"},
    "dms": {"momentum": 0.5, "num_clients": 5},  # 2 devices do not divide 5
    "scaffold": EVEN | {"algorithm": "scaffold"},
    "learning rates": EVEN
    | {"algorithm": "fedavg", "lr_schedule": "exponential", "lr_decay": 0.9},
    "timeline": {"algorithm": "fedavg", "timeline__framework": "tsfl"},
    "cohort": COHORT | {"cohort__weighting": "unbiased"},
    "scaffold in cohorts": COHORT | {"algorithm": "scaffold"},
    "power_of_choice": CHOOSING,
    "oort": CHOOSING
    | {
        "cohort__sampler": "oort",
        "cohort__preferred": 60.0,
        "schedule__dropout": 0.2,
    },
    "local layers": {
        "schedule__kind": "explicit",
        "schedule__tau": (1, 2, 3, 4),
        "partition__kind": "shards",
        "evaluation__clients": "labels",
        "evaluation__number": 3,
        "model__local": "Dense_1",
    },
    "local layers with a period": {
        "algorithm": "fedavg",
        "partition__kind": "shards",
        "model__local": "Dense_1",
        "model__local_period": 2,
        "num_clients": 5,
        "cohort__size": 2,
    },
    "local layers in a buffer": {
        "algorithm": "fedbuff",
        "model__local": "Dense_1",
        "evaluation__clients": "labels",
        "timeline__framework": "fedbuff",
        "timeline__buffer": 3,
        "timeline__speed": "constant(1);constant(1.3);constant(0.3);constant(1)",
    },
    "compressed in cohorts": COHORT
    | {
        "uplink__chain": "model_download,topk,quantize",
        "topk__feedback": "ef",
        "quantize__feedback": "ef21",
    },
    "compressed in a buffer": {
        "algorithm": "fedbuff",
        "uplink__chain": "randk,sign",
        "randk__feedback": "ef",
        "timeline__framework": "fedbuff",
        "timeline__buffer": 3,
        "timeline__speed": "constant(1);constant(1.3);constant(0.3);constant(1)",
    },
    # Twice in a buffer, an adaptive norm, and noise of the sum and of the count.
    "noise": {
        "algorithm": "fedbuff",
        "timeline__framework": "fedbuff",
        "timeline__buffer": 3,
        "timeline__speed": "constant(1);constant(1.3);constant(0.3);constant(1)",
        "uplink__chain": "clip,noise",
        "clip__norm": 0.3,
        "clip__quantile": 0.5,
        "noise__multiplier": 0.2,
    },
    "colluding attackers": {
        "algorithm": "fedavg",
        "num_clients": 5,
        "attack__kind": "alie",
        "attack__share": 0.4,
    },
    "attackers in cohorts": COHORT
    | {
        "attack__kind": "gaussian",
        "attack__share": 0.3,
        "uplink__chain": "topk",
        "topk__feedback": "ef",
    },
    "backdoor": {
        "algorithm": "centered_clipping",
        "attack__kind": "backdoor",
        "attack__share": 0.3,
    },
    # Each seed holds out other samples.
    "online": {
        "algorithm": "fedavg",
        "partition__online": True,
        "data__validation": 200,
        "measure_regret": True,
    },
}


def config_of(kind, **changes):
    if kind == "noise":
        pytest.importorskip("dp_accounting")
    return small(**KINDS[kind] | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Kind → (folder, result) of its whole run."""
    runs = {}

    def run(kind):
        if kind not in runs:
            folder = tmp_path_factory.mktemp("whole") / "run"
            runs[kind] = folder, tsfl_jax.simulate(config_of(kind), workdir=folder)
        return runs[kind]

    return run


def same_results(result, expected) -> None:
    problems.same_history(result, expected)
    problems.same_bits(result.params, expected.params)
    problems.same_bits(result.own, expected.own)


def resumed(kind, folder, expected, tmp_path):
    problems.stop(config_of(kind), tmp_path)
    result = tsfl_jax.simulate(config_of(kind), workdir=tmp_path)
    problems.same(problems.files(tmp_path), problems.files(folder))
    same_results(result, expected)


def longer(kind, folder, expected, tmp_path):
    """Begun with T = 2, then continued with a larger T."""
    tsfl_jax.simulate(config_of(kind, num_intervals=2), workdir=tmp_path)
    same_results(tsfl_jax.simulate(config_of(kind), workdir=tmp_path), expected)


def in_a_sweep(kind, folder, expected, tmp_path):
    """Beside a run with another seed, whose values it must not get."""
    swept = tsfl_jax.sweep(config_of(kind), {"seed": [3, 0]})
    history = {name: values[1] for name, values in swept.history.items()}
    history |= swept.series[1]  # where runs differ in their number of clients
    for name in {*expected.history} & {*history} - {"samples"}:
        np.testing.assert_allclose(
            history[name], expected.history[name], 1e-4, 1e-6, err_msg=name
        )
    row, summary = swept.rows[1], expected.summary
    for name in ("samples_trained", "bytes_moved"):
        assert row[name] == summary[name], name
    assert row["best_test_accuracy"] == pytest.approx(summary["best_test_accuracy"])
    assert swept.rows[0]["split_sha"] != row["split_sha"]
    for name, value in summary["fingerprints"].items():
        assert row[f"{name}_sha"] == value


def on_two_devices(kind, folder, expected, tmp_path):
    result = tsfl_jax.simulate(config_of(kind, devices=2))
    assert (expected.summary["num_devices"], result.summary["num_devices"]) == (1, 2)
    same_results(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scaffold", *CHOSEN])
def test_a_call_that_is_filled_up_changes_no_bit(kind):
    """Seven intervals in calls of four, the last one of three, and in one of seven."""
    config = config_of(kind, num_intervals=7, report_every=0)
    results = map(tsfl_jax.simulate, (config, replace(config, {"report_every": 7})))
    same_results(*results)


WAYS = [resumed, longer, in_a_sweep, on_two_devices]
# The schedule of other kinds depends on T, or which clients ever work.
ONLY = {longer: ["scaffold", "learning rates", "timeline", "local layers"]}
# The regret's last bits depend on the devices, see `identity.depends_on_devices`.
ONLY[on_two_devices] = [kind for kind in KINDS if kind != "online"]
# DMS on two devices: `test_pinned`.
PERIOD = "local layers with a period"
FAST = {resumed: [PERIOD], longer: ["scaffold"], on_two_devices: [PERIOD]}


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param(
            way,
            kind,
            marks=[pytest.mark.slow] * (kind not in FAST.get(way, ())),
            id=f"{way.__name__}-{kind}",
        )
        for way in WAYS
        for kind in ONLY.get(way, KINDS)
    ],
)
def test_one_result(whole, tmp_path, way, kind):
    folder, expected = whole(kind)
    assert jax.tree.leaves(expected.params)
    way(kind, folder, expected, tmp_path / "run")
