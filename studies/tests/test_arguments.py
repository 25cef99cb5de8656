"""Arguments of the studies that cannot work end in one line, before any run."""

import functools

import pytest

from studies import (
    adversary,
    arena,
    bounds,
    calibrate,
    compare,
    heterogeneity,
    learned,
    mcmahan,
    oracle,
    phases,
    reproduce,
    riders,
    sensitivity,
    study,
    theory,
)
from tsfl_jax import config_files
from tsfl_jax.config import Config
from tsfl_jax.run import grid
from tsfl_jax.types import UserError

SET = "sets it in each run"
PARSE = {
    name: functools.partial(study.parse, module.STUDY)
    for name, module in {
        "riders": riders,
        "sensitivity": sensitivity,
        "oracle": oracle,
        "phases": phases,
    }.items()
} | {
    "adversary": adversary.parse,
    "arena": arena.parse,
    "arena.main": arena.main,
    "calibrate": calibrate.parse,
    "compare": compare.main,
    "heterogeneity": heterogeneity.parse,
    "learned": learned.parse,
    "learned.main": learned.main,
    "mcmahan": mcmahan.parse,
    "reproduce": reproduce.main,
    "theory.main": theory.main,
}
COMMANDS = [
    ("riders --set schedule.free_riders=10", SET),
    ("sensitivity --set momentum=0.5", SET),
    ("oracle --set measure_regret=False", SET),
    ("heterogeneity fig2a --set schedule.kind=case2", SET),
    ("heterogeneity fig2b --set timeline.speed=constant(1)", SET),
    ("calibrate --set momentum=0.3", SET),
    ("mcmahan --set lr=0.1", SET),
    ("arena.main --set partition.kind=iid --out .", SET),
    ("arena --rules dms", "fedavg must be among them"),
    ("adversary --rules dms dms", "expected two different rules"),
    ("adversary --rules dms krum", "shares no program"),
    ("adversary --population 2", "must be at least 4"),
    ("calibrate --variants=5:5", "--variants=5:5: expected"),
    ("compare gone.py", "gone.py: no such file"),
    ("compare smoke", "choose a framework"),
    ("compare afl --set lr=-1", "--config.lr=-1.0"),
    ("reproduce table1 --set lrr=1", "--set=lrr=1: there is no such setting"),
    ("reproduce table1 --case 3", "no cell of this --data and --case; see table2"),
    ("learned --rate inf", "must be above 0"),
    ("learned.main --theta tau=1,tau=1", "a number for each of"),
    ("mcmahan --cells 10,10 --networks cnn", "--cells 10,10: no such row"),
    ("oracle --idx /no/such", "no such folder"),
    ("theory.main nowhere", "no finished run there"),
]


@pytest.mark.parametrize(("line", "message"), COMMANDS)
def test_wrong_arguments(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command, *words = line.split()
    with pytest.raises((SystemExit, UserError)) as error:
        PARSE[command](words)
    answer = capsys.readouterr().err or str(error.value)
    assert message in answer and answer.strip().count("\n") == 0
    assert list(tmp_path.iterdir()) == []


def test_settings_that_a_study_cannot_use():
    config = Config(num_intervals=9, eval_every=5)
    with pytest.raises(UserError, match="eval_every=5: the model is tested 2 times"):
        phases.points(config, study.parse(phases.STUDY, []))
    several = grid.changed(config_files.load("quadratic"), {"num_intervals": 2})
    with pytest.raises(UserError, match="one curvature"):
        bounds.run_setting("", several, 1)


def test_variants_and_cells_are_chosen_once_in_order():
    chosen = calibrate.parse(["--variants", "12:14"]).variants
    assert [calibrate.VARIANTS.index(variant) for variant in chosen] == [12, 13]
    words = ["--rules", "fedavg", "dms", "dms", "--fleets", "equal", "equal"]
    plan = arena.parse([*words, "--splits", "IID", "IID"])
    assert (plan.rules, plan.fleets) == (("fedavg", "dms"), ("equal",))
