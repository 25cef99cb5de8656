"""The study of the oracle: its table by hand, its runs, its arguments."""

import numpy as np

from studies import oracle, study
from tsfl_jax.run import sweeps


def invented(names, seeds=2, intervals=6):
    """Accuracy 50 %, the oracle 10 points above at first; regret 0.3, 0.2, …"""
    shape = (len(names) * seeds, intervals)
    accuracy, early = np.full(shape, 0.5), np.arange(intervals) < 2
    regret = np.full(shape, 0.3)
    for lane, name in enumerate(np.repeat(names, seeds)):
        accuracy[lane] += 0.1 * early * (name == "oracle") + 0.01 * (lane % seeds)
        regret[lane] = 0.0 if name == "oracle" else 0.3
        regret[lane, -2:] /= 3
    gap = np.where(np.repeat(names, seeds) == "median", np.nan, 1.0)[:, None]
    return {
        "test_accuracy": accuracy,
        "diverged": np.zeros(shape, bool),
        "test_loss": 1 - accuracy,
        "regret": regret,
        "gap": gap + 0 * regret,
    }


def results_of(words, tmp_path):
    """The results by rule that a command gives in Case 1."""
    given = study.parse(oracle.STUDY, words)
    config, _ = study.config_of(given, "1")
    points = oracle.points(config, given)
    return oracle.results_of(study.run(config, points, given.seeds, tmp_path))


def test_the_table_by_hand(tmp_path, monkeypatch):
    calls = []

    def run(config, points, **options):
        names = list(dict.fromkeys(p["algorithm"] for p in points))
        calls.append((config, points, options))
        return sweeps.SweepResult([], invented(names))

    monkeypatch.setattr(sweeps, "run", run)
    words = ["--seeds", "2", "--case", "1", "--rules"]
    results = results_of([*words, "oracle", "median"], tmp_path)
    assert [p["algorithm"] for p in calls[0][1]][::2] == ["fedavg", "oracle", "median"]
    first, best, other = oracle.rule_rows(results)
    assert first["best − FedAvg"] == "–" and first["gap"] == "1.0000 ± 0.0000"
    assert best["best − FedAvg"] == "+10.00 ± 0.00"
    assert best["mean over the run − FedAvg"] == "+3.33 ± 0.00"
    assert best["last third − FedAvg"] == "+0.00 ± 0.00"
    assert best["regret"] == "0.0000 ± 0.0000"
    # (4·0.3 + 2·0.1)/6
    assert other["regret"] == "0.2333 ± 0.0000" and other["gap"] == "–"
    assert other["regret, last third"] == "0.1000 ± 0.0000"
    # A diverged run has chance accuracy, and nothing of its good intervals.
    history = invented(["fedavg", "dms"])
    history["diverged"][2, 3:] = True
    for field in ("test_accuracy", "test_loss", "regret", "gap"):
        history[field][2, 4:] = np.nan
    monkeypatch.setattr(sweeps, "run", lambda *a, **k: sweeps.SweepResult([], history))
    _, lost = oracle.rule_rows(results_of([*words, "dms"], tmp_path))
    assert lost["best accuracy, %"].startswith("30.50")  # of 10 and 51 %
    for column in ("lowest test loss − FedAvg", "regret", "regret, last third", "gap"):
        assert lost[column] == "–"
    monkeypatch.setattr(sweeps, "run", run)
    words = ["--seeds", "2", "--case", "3", "--out", str(tmp_path / "out")]
    study.main(oracle.STUDY, [*words, "--set", "oracle.steps=5"])
    config = calls[1][0]
    assert config.measure_regret and config.oracle.steps == 5
    assert config.data.validation == 200 and config.schedule.kind == "case3"
    text = (tmp_path / "out" / "oracle_digits_case3_intervals.csv").read_text()
    assert text.splitlines()[1] == "fedavg,1,0,0,0.3,0"
    text = (tmp_path / "out" / "oracle_digits_case3.md").read_text()
    assert "oracle.steps=5, 30 intervals, 2 seeds, 200 validation samples" in text
