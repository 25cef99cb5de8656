"""Outputs on the test set give scikit-learn the scores that a run measured."""

import flax.linen as nn
import numpy as np
import pytest
from sklearn import metrics

import tsfl_jax
from tsfl_jax.config import Config


def config_of(**settings):
    config = Config(num_intervals=2, num_clients=4, batch_size=8, lr=0.1)
    config.algorithm = "fedavg"
    config.schedule.data_size, config.partition.kind = 32, "iid"
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def data_of(count=700):
    """Tests of more than one batch, the last one padded."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0.5)
    return tsfl_jax.make_dataset(x[:400], y[:400], x[400:], y[400:])


def test_outputs_give_what_the_run_measured():
    config, model, data = config_of(), nn.Dense(3), data_of()
    result = tsfl_jax.simulate(config, model=model, dataset=data)
    outputs, labels = tsfl_jax.predict(config, result.params, model=model, dataset=data)
    assert outputs.shape == (300, 3) and outputs.dtype == np.float32
    np.testing.assert_array_equal(labels, data.y_test)
    given = result.params["params"]
    x = (data.x_test - data.mean) / data.std
    np.testing.assert_allclose(
        outputs, x @ given["kernel"] + given["bias"], rtol=1e-5, atol=1e-6
    )
    accuracy = metrics.accuracy_score(labels, outputs.argmax(1))
    assert accuracy == pytest.approx(result.history["test_accuracy"][-1])
    share = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    loss = metrics.log_loss(labels, share)
    assert loss == pytest.approx(result.history["test_loss"][-1], rel=1e-5)
    assert 0 < metrics.f1_score(labels, outputs.argmax(1), average="macro") < 1


def test_a_network_by_name():
    config = config_of(num_intervals=1)
    config.data.name, config.model.name = "digits", "mlp"
    params = tsfl_jax.simulate(config).params
    outputs, labels = tsfl_jax.predict(config, params)
    assert outputs.shape == (len(labels), 10)
