"""Scores of clients from the settings to the files, in runs, sweeps and cohorts."""

import numpy as np
import pytest

import tsfl_jax
from tests.problems import small
from tsfl_jax.data.client_test import SERIES
from tsfl_jax.prepare import prepare
from tsfl_jax.report import files, page

C, N, F = 3, 5, 2  # classes, clients, features


def samples():
    """Client i has another mix of labels than the others; two know no client."""
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(330, F)).astype(np.float32), draws.integers(0, C, 330)
    x[np.arange(330), y % F] += 1.0 + y
    owner = np.minimum(draws.integers(0, N + 2, 330), 2 * y + 2)
    owner[:N] = np.arange(N)
    parts = x[:130], y[:130], x[130:], y[130:]
    train, test = owner[:130] % N, owner[130:]
    return tsfl_jax.make_dataset(*parts, client=train, test_client=test)


DATA = samples()


def config_of(**changes):
    settings = {
        "hidden": 4,
        "algorithm": "fedavg",
        "num_clients": N,
        "num_intervals": 4,
        "eval_every": 2,
        "lr": 0.05,
        "schedule__data_size": None,  # all samples that a client has
        "schedule__interval_seconds": 1.0,
        "partition__kind": "client",
        "evaluation__clients": "own",
    }
    return small(**settings | changes)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """The folder and the result of a run that scores own samples."""
    folder = tmp_path_factory.mktemp("own") / "run"
    return folder, tsfl_jax.simulate(config_of(), dataset=DATA, workdir=folder)


def outputs(params, x):
    """Logits of the network of one hidden layer, float64."""
    layers = [{n: np.asarray(a, float) for n, a in p.items()} for p in params.values()]
    hidden = np.maximum(x @ layers[0]["kernel"] + layers[0]["bias"], 0)
    return hidden @ layers[1]["kernel"] + layers[1]["bias"]


def scored(result):
    """(right, loss) of each test sample under the final model, in float64."""
    x = (DATA.x_test.astype(float) - DATA.mean) / DATA.std
    logits = outputs(result.params["params"], x)
    top = logits.max(axis=1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    y = DATA.y_test
    return logits.argmax(1) == y, lse - logits[np.arange(len(y)), y]


def gini(x):
    return np.abs(x[:, None] - x).mean() / (2 * x.mean())


def check_last(result, right, loss):
    """The last interval has mean, worst, std, Gini of these, one for each client."""
    found = {name: result.history[name][-1] for name in SERIES}
    want = [right.mean(), right.min(), right.std(), gini(right)]
    want += [loss.mean(), loss.max(), loss.std(), gini(loss)]
    np.testing.assert_allclose([*found.values()], want, rtol=2e-5)
    assert result.summary["final_client_accuracy_gini"] == found[SERIES[3]]
    assert result.summary["final_client_accuracy_mean"] == found[SERIES[0]]
    assert result.summary["final_client_accuracy_worst"] == found[SERIES[1]]


def test_own_samples_against_numpy(own):
    result, owner = own[1], DATA.test_client
    assert owner is not None and owner.max() > N - 1  # of nobody who is scored
    right, loss = (
        np.array([values[owner == i].mean() for i in range(N)])
        for values in scored(result)
    )
    assert np.ptp(right) > 0.05
    check_last(result, right, loss)
    assert np.isnan(result.history[SERIES[0]][::2]).all()  # not evaluated


def test_label_mix_against_numpy():
    result = tsfl_jax.simulate(config_of(evaluation__clients="labels"), dataset=DATA)
    each = np.stack(
        [
            [values[DATA.y_test == c].mean() for c in range(C)]
            for values in scored(result)
        ]
    )
    mix = [np.bincount(DATA.y_train[DATA.client == i], minlength=C) for i in range(N)]
    check_last(result, *(each @ (np.stack(mix) / np.sum(mix, 1, keepdims=True)).T))


@pytest.mark.slow
def test_files_of_a_run_and_of_a_sweep(own, tmp_path):
    folder, history = own[0], own[1].history
    rows = files.read_metrics(folder / "metrics.jsonl")
    for name in SERIES:
        assert [row[name] for row in rows] == files.plain(history[name])
    arrays = files.read_arrays(folder / "clients.npz")
    np.testing.assert_array_equal(arrays["tested_client"], np.arange(N))
    worst = arrays["final_accuracy"].min()
    assert worst == history["client_accuracy_worst"][-1]
    text = page.make_page([folder])
    assert "worst decile, %" in text and "mean over clients in %" in text
    config = config_of(evaluation__clients="labels")
    sweep = {"dataset": DATA, "workdir": tmp_path / "sweep"}
    swept = tsfl_jax.sweep(config, {"seed": [0, 1]}, **sweep)
    table = swept.to_xarray()
    assert table[SERIES[0]].dims == ("seed", "interval")
    assert table["client_loss_worst"].attrs["units"] == "nat"
    assert "worst decile in %" in page.make_page([tmp_path / "sweep"])


@pytest.mark.slow
def test_cohorts_score_those_who_are_ever_asked(tmp_path):
    config = config_of(
        num_clients=40,
        cohort__size=3,
        partition__kind="iid",
        partition__replacement=True,
        schedule__data_size=20,
        evaluation__clients="labels",
        schedule__interval_seconds=3.0,
        schedule__dropout=0.3,
    )
    prepared = prepare.prepare(config, dataset=DATA)
    assert prepared.tested is not None
    np.testing.assert_array_equal(prepared.tested.client, prepared.workload.drawn)
    result = tsfl_jax.simulate(config, dataset=DATA, workdir=tmp_path)
    assert result.history[SERIES[0]].shape == result.history["test_accuracy"].shape
    assert result.history["client_accuracy_std"][-1] > 0
    arrays = files.read_arrays(tmp_path / "clients.npz")
    each = dict(zip(arrays["tested_client"], arrays["final_accuracy"], strict=True))
    mean = np.mean([*each.values()])
    np.testing.assert_allclose(result.history["client_accuracy_mean"][-1], mean)
