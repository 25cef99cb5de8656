"""The examples of docs/own.md run, each as it stands, and what they rest on."""

import contextlib
import io
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.rules import own

TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "own.md").read_text()
EXAMPLES = {
    title: block
    for title, section in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    for block in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S)
}


def run(title: str) -> tuple[dict, str]:
    """Variables and output of an example."""
    variables, out = {}, io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(EXAMPLES[title], variables)
    return variables, out.getvalue()


def small() -> tsfl_jax.Config:
    """Two intervals of four clients on digits."""
    config = tsfl_jax.Config(num_intervals=2, num_clients=4, batch_size=8)
    config.schedule.data_size = 32
    return config


def test_a_rule():
    variables, _ = run("A rule")
    rho = variables["result"].history["rho"]
    np.testing.assert_allclose(rho.sum(axis=1), 1, rtol=1e-6)
    assert np.ptp(rho) > 0.05


def test_a_rule_in_a_loop():
    _, out = run("A rule in your own training loop")
    assert [line.split()[0] for line in out.splitlines()] == [
        *("fedavg", "median", "krum", "fedadam")
    ]


def test_aggregators_of_optax():
    variables, _ = run("Aggregators of optax")
    assert variables["result"].history["test_accuracy"][-1] > 0
    krum, updates = variables["krum"], {"w": jnp.array([[1.0], [1.1], [0.9], [40.0]])}
    params = {"w": jnp.zeros(1)}
    gradients = jax.tree.map(jnp.negative, updates)
    moved, _ = krum.update(gradients, krum.init(params), params)
    assert 0.9 <= float(moved["w"][0]) <= 1.1


def test_derivatives():
    _, out = run("Derivatives")
    assert "nan" not in out and "Array" in out


def test_every_rule_of_the_table_works_in_a_loop():
    """As in the simulator: FedAvg by hand, and all others give finite models."""
    rows = re.findall(r"^\| (`.+?) \|", TEXT, re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(tsfl_jax.AGGREGATORS)
    params = {"params": {"w": jnp.array([1.0, 2.0])}}
    updates = {"params": {"w": jnp.array([[1.0, 0], [0, 1], [2, 2], [1, 1], [0, 3]])}}
    tau, size = jnp.array([1, 2, 0, 1, 4]), jnp.array([1, 3, 9, 4, 2])
    hparams = own.HPARAMS._replace(
        smoothness=1.0, grad_sq_norm=2.0, grad_variance=1.0, lr=0.1
    )
    for name, rule in tsfl_jax.AGGREGATORS.items():
        given = {"tau": tau, "size": size, "hparams": hparams}
        if rule.uses_gradients:
            with pytest.raises(tsfl_jax.UserError, match="gradients="):
                tsfl_jax.aggregate(rule, updates, params, **given)
            continue
        state = tsfl_jax.init_rule(rule, params, num_clients=5)
        new, _ = tsfl_jax.aggregate(rule, updates, params, state, **given)
        moved = np.asarray(new["params"]["w"]) - [1, 2]
        assert np.isfinite(moved).all() and np.abs(moved).max() > 1e-3, name
        if name == "fedavg":
            np.testing.assert_allclose(moved, [0.5, 1.3], rtol=1e-6)


def test_a_lost_update_gives_its_weight_to_the_others():
    rule = tsfl_jax.AGGREGATORS["fedavg"]
    updates = {"w": jnp.array([[1.0], [jnp.nan], [3.0]])}
    new, _ = tsfl_jax.aggregate(rule, updates, {"w": jnp.zeros(1)})
    np.testing.assert_allclose(new["w"], [2.0], rtol=1e-6)


def test_own_weights_have_a_border():
    situation = own.Situation(
        *(None, None, jnp.array([1, 0, 3]), jnp.ones(3), None, None, None, None)
    )
    hparams = own.HPARAMS
    weights = tsfl_jax.rule(lambda s, h: s.size * h.lr).weights(situation, hparams)
    np.testing.assert_allclose(weights.rho, [0.5, 0, 0.5])
    plain = tsfl_jax.rule(lambda s: s.size * 3, normalize=False)
    np.testing.assert_allclose(plain.weights(situation, hparams).rho, [3, 0, 3])
    with pytest.raises(tsfl_jax.UserError, match=r"shape \[2\]; expected \[3\]"):
        tsfl_jax.rule(lambda s: jnp.ones(2)).weights(situation, hparams)
    with pytest.raises(tsfl_jax.UserError, match="expected a function"):
        tsfl_jax.rule(3)
    with pytest.raises(tsfl_jax.UserError, match="expected a field"):
        tsfl_jax.rule(lambda s: s.size, updates=None)


def test_optax_without_aggregators_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax.experimental", None)
    with pytest.raises(tsfl_jax.UserError, match="install a newer optax"):
        tsfl_jax.to_optax(tsfl_jax.AGGREGATORS["krum"], 4)
