"""What `Result` and `SweepResult` show, give to pandas and plot."""

import numpy as np

import tsfl_jax
from tsfl_jax.experiment import runner, sweeps

T, N = 3, 2


def series(value=0.5):
    return {
        "virtual_time": np.arange(1.0, T + 1),
        "test_accuracy": np.full(T, value),
        "test_loss": np.array([1.0, np.nan, 0.5]),
        "train_loss": np.ones(T),
    }


def run_result(**changes):
    summary = {
        "algorithm": "dms",
        "data": "digits",
        "seed": 0,
        "num_intervals": T,
        "best_test_accuracy": 0.5,
        "final_test_accuracy": 0.25,
        "final_test_loss": 0.5,
        "diverged_at": None,
    }
    history = series() | {"rho": np.ones((T, N)), "coupling": np.zeros(T)}
    return runner.Result({}, history, summary | changes)


def sweep_result(lanes=3, rate=None):
    rows = [
        {
            "run": lane,
            "lr": f"{rate}{lane}" if rate else 0.1 * (lane + 1),
            "best_test_accuracy": 0.5 + 0.1 * lane,
            "final_test_accuracy": 0.5,
            "final_test_loss": 1.0,
            "diverged_at": 2 if lane == 2 else None,
            "seconds": 1.0,
            "data": "digits",
        }
        for lane in range(lanes)
    ]
    one = [series(0.1 * lane) for lane in range(lanes)]
    history = {name: np.stack([s[name] for s in one]) for name in one[0]}
    return sweeps.SweepResult(rows, history, ["lr"], one)


def test_three_lines():
    lines = repr(run_result()).splitlines()
    assert lines[0] == "run            digits, dms, seed 0"
    assert lines[1] == "test accuracy  best 50.0 %, final 25.0 %"
    assert "no model was finite in interval 2" in repr(run_result(diverged_at=2))
    lines = repr(sweep_result()).splitlines()
    assert len(lines) == 3
    assert lines[0] == "SweepResult: 3 runs over lr"
    assert lines[1] == "  Highest mean of best accuracy: lr=0.2"


def test_html_is_escaped():
    text = sweep_result(60, "<b>")._repr_html_()
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert text.count("<tr") == 1 + 51 and "60 rows" in text


def test_plots():
    left, right = run_result().plot().axes
    np.testing.assert_allclose(left.lines[0].get_ydata(), 50)
    assert len(right.lines) == 2
    figure = sweep_result().plot()
    assert len(figure.axes[0].lines) == 3


def test_real_results_have_all_of_it():
    config = tsfl_jax.Config(num_intervals=2, num_clients=2, batch_size=4, devices=1)
    config.algorithm, config.schedule.data_size = "fedavg", 16
    config.model.hidden = 0
    result = tsfl_jax.sweep(config, {"seed": [0, 1]})
    frame = result.to_pandas()
    assert len(frame) == 4 and list(frame)[:3] == ["run", "seed", "interval"]
    assert "2 runs over seed" in repr(result) and "<td>2</td>" in result._repr_html_()
