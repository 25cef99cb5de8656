"""Collections besides the parameters: batch statistics, counters and random keys."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsfl_jax
from tests.problems import small
from tsfl_jax.rules import apply
from tsfl_jax.timeline import FRAMEWORKS

CLIENTS = 8


class Normed(nn.Module):
    """A BatchNorm whose running statistics follow each batch, and a counter."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        calls = self.variable("counters", "calls", lambda: jnp.int32(0))
        if train:
            calls.value += 1
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(3)(x)


def dataset():
    """Features of variance 0.1² far from the initial running variance of 1."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 400)
    x = (0.1 * rng.normal(size=(400, 4)) + 0.05 * y[:, None]).astype(np.float32)
    return tsfl_jax.make_dataset(x[:320], y[:320], x[320:], y[320:])


def config_of(rule: str, framework: str = "tau", **changes) -> tsfl_jax.Config:
    settings = {
        "hidden": None,
        "algorithm": rule,
        "num_intervals": 3,
        "report_every": 3,
        "num_clients": CLIENTS,
        "schedule__data_size": 32,
        "schedule__interval_seconds": 3.0,
        "timeline__framework": framework,
        "timeline__speed": "uniform(0.2,2)",
    }
    if framework == "tau":  # the example of unequal work
        settings = {n: v for n, v in settings.items() if "timeline" not in n}
        settings |= {"schedule__kind": "case1", "schedule__iteration": "step"}
        return small(**settings | {"schedule__interval_seconds": 1.0} | changes)
    if framework == "fedbuff":
        settings["timeline__buffer"] = 3
    if framework != "tsfl":
        settings["timeline__local_iterations"] = 2
    return small(**settings | changes)


# Sums of weights other than 1; the other rules and frameworks take longer.
@pytest.mark.parametrize(
    ("rule", "framework"),
    [("fednova", "tau")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            *((rule, "tau") for rule in tsfl_jax.AGGREGATORS if rule != "fednova"),
            *(("fednova", name) for name in FRAMEWORKS),
        ]
    ],
)
def test_variances_stay_within_those_of_the_data(rule, framework):
    """Whatever the rule and framework, a variance is a mean of the clients' own.

    Every batch has a variance below 1, so that every client's running one is in (0, 1],
    and it falls; FedNova's Σ ρ of 2 and more would make it negative.
    """
    config = config_of(rule, framework)
    if rule in ("dms_adaptive", "learned", "oracle", "fltrust"):
        config.data.validation = 40
    result = tsfl_jax.simulate(config, model=Normed(), dataset=dataset())
    norm = result.params["batch_stats"]["BatchNorm_0"]
    assert (norm["var"] > 0).all() and (norm["var"] < 1).all()
    assert not np.isinf(result.history["test_loss"]).any()  # NaN: not measured
    assert np.isfinite(result.history["test_loss"][-1])
    assert result.params["counters"]["calls"] > 0


def test_fednova_by_hand():
    """One step each but ten of the last: Σ ρ is far above 1, the variances stay."""
    rule = tsfl_jax.AGGREGATORS["fednova"]
    params = {"params": {"w": jnp.zeros(1)}, "batch_stats": {"var": jnp.ones(1)}}
    steps = np.array([1, 1, 1, 1, 1, 1, 1, 10])
    own = 1 + (0.1 - 1) * (1 - 0.9**steps)  # EMA from 1 towards 0.1
    updates = {
        "params": {"w": jnp.ones((8, 1))},
        "batch_stats": {"var": jnp.float32(own - 1)[:, None]},
    }
    aggregate = jax.jit(lambda *args, **work: tsfl_jax.aggregate(rule, *args, **work))
    new, _ = aggregate(updates, params, tau=steps, steps=steps)
    rho = np.array([1.0] * 7 + [0.1]) / 7.1  # ∝ 1/steps with equal sizes
    expected = (rho * own).sum()
    np.testing.assert_allclose(new["batch_stats"]["var"], [expected], rtol=1e-6)


@pytest.mark.parametrize(
    ("rho", "weights"),
    [
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]),
        ([2.0, 1.0, 0.0], [2 / 3, 1 / 3, 0.0]),  # Σ ρ = 3
        ([1.5, -0.5, 0.0], [1.0, 0.0, 0.0]),
        ([0.1, 0.0, 0.3], [1.0, 0.0, 0.0]),  # the third was lost
        ([-1.0, 0.0, 0.0], [0.5, 0.5, 0.0]),  # no positive weight
    ],
)
def test_mean_values_by_hand(rho, weights):
    values = jnp.array([[0.1], [0.4], [jnp.float32(7.0)]])
    present = jnp.array([True, True, False])
    found = apply.mean_values([values], jnp.array(rho), present)[0]
    np.testing.assert_allclose(found, [weights[0] * 0.1 + weights[1] * 0.4], rtol=1e-6)


def test_keys_in_an_optimizer_differ_by_interval_and_client():
    """The noise of 16 clients averages out: std of the mean is a quarter of one's."""

    class Nothing(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.zeros, (4000,))
            return jnp.zeros((len(x), 3)) + 0 * w.sum()

    config = config_of(
        "fedavg",
        num_clients=16,
        num_intervals=2,
        schedule__kind="explicit",
        schedule__data_size=16,
        schedule__tau=(1,),
    )
    noise = optax.chain(
        optax.add_noise(eta=1.0, gamma=0.0, key=jax.random.key(7)), optax.scale(0.1)
    )
    made = tsfl_jax.simulate(
        config, model=Nothing(), dataset=dataset(), optimizer=noise
    )
    # √2 of two intervals: equal noise in both would be twice as much.
    found = float(np.std(made.params["params"]["w"]))
    assert found == pytest.approx(0.1 / 4 * 2**0.5, rel=0.05)
