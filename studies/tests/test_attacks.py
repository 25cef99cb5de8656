"""The study of attacks: its points, its tables by hand, and a small one."""

import numpy as np
import pandas
import pytest

from studies import attacks
from studies.study import Runs
from tsfl_jax.config import Config, replace
from tsfl_jax.run.sweeps import SweepResult


def test_points_and_weights_by_hand():
    given = attacks.parse([])
    points = attacks.points(given, "tsfl")
    assert len(points) == 7 * (1 + 7 * 3)
    assert points["median", "none", 0.0]["attack.share"] * 20 < 0.5  # nobody
    assert points["multi_krum", "alie", 0.2]["krum.trim"] == 0.3
    few = attacks.parse(["--rules", "median", "--attacks", "ipm", "--shares", "0.2"])
    assert len(attacks.points(few, "fedbuff")) == 2
    config = replace(Config(), {"num_clients": 5})
    keys = [("dms", "sign_flip", claim, seed) for claim in (0, 8) for seed in (0, 1)]
    names = ["rule", "attack", "claim", "seed"]
    rho = np.full((4, 3, 5), 0.1)  # of five clients one attacks
    runs = Runs(
        config,
        2,
        pandas.MultiIndex.from_tuples(keys, names=names),
        SweepResult([{}] * 4, {"rho": rho}),
        10,
    )
    np.testing.assert_allclose(attacks.attackers_weight(runs), 10.0)


@pytest.mark.slow
def test_files(tmp_path, capsys):
    line = "--seeds 2 --intervals 2 --rules fedavg median --shares 0.2 --attacks"
    words = [*line.split(), "sign_flip", "backdoor", "--frameworks", "tsfl"]
    attacks.main([*words, "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for kind in ("md", "csv", "png", "pdf"):
        path = tmp_path / f"attacks_digits_tsfl.{kind}"
        assert path.stat().st_size and str(path) in printed
    table = pandas.read_csv(tmp_path / "attacks_digits_tsfl.csv")
    assert table["rule"].tolist() == ["FedAvg"] * 2 + ["median"] * 2
    assert table["attackers"].tolist() == ["0%", "20%"] * 2
    assert (table["backdoor success"] == "–").tolist() == [True, False] * 2
