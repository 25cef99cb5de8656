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
    ("heterogeneity fig2b --set timeline.speed=constant(1)", SET),
    ("arena.main --set partition.kind=iid --out .", SET),
    ("arena --rules dms", "fedavg must be among them"),
    ("adversary --rules dms krum", "shares no program"),
    ("compare smoke", "choose a framework"),
    ("reproduce table1 --case 3", "no cell of this --data and --case; see table2"),
    ("learned.main --theta tau=1,tau=1", "a number for each of"),
    ("mcmahan --cells 10,10 --networks cnn", "--cells 10,10: no such row"),
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


def test_a_text_may_have_commas():
    listed = ["timeline.power=5,1.5,0.2; 1,1,1", "lr=0.1"]
    changes = {"timeline.power": "5,1.5,0.2; 1,1,1", "lr": 0.1}
    assert grid.parse_settings(listed) == changes
    with pytest.raises(UserError, match="lr: cannot be set to one value"):
        grid.parse_settings(["lr=0.1,0.2"])


def test_settings_that_a_study_cannot_use():
    config = Config(num_intervals=9, eval_every=5)
    with pytest.raises(UserError, match="eval_every=5: the model is tested 2 times"):
        phases.points(config, study.parse(phases.STUDY, []))
    several = grid.changed(config_files.load("quadratic"), {"num_intervals": 2})
    with pytest.raises(UserError, match="one curvature"):
        bounds.run_setting("", several, 1)
