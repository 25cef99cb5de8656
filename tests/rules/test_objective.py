"""Rules that correct for local work end where F = Σ p_i F_i has its minimum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsfl_jax
from tests import problems, reference
from tests.rules.test_rules import HP, TAU, close, received, run
from tsfl_jax import rules
from tsfl_jax.config import Config
from tsfl_jax.data.quadratic import Quadratic
from tsfl_jax.prepare.workload import draw_workload
from tsfl_jax.rules.base import Counts
from tsfl_jax.rules.client_memory import ByClient
from tsfl_jax.types import Dataset, UserError


def dataset(optima, sizes) -> Dataset:
    """Client i holds the number w_i* as often as it has samples: no noise at all."""
    x = np.repeat(np.array(optima, np.float32), sizes)[:, None]
    one, zero = np.ones((), np.float32), np.zeros((), np.float32)
    labels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    N = len(sizes)
    return Dataset("numbers", x, labels, x[:1], labels[:1], N, zero, one)


def settings(algorithm, sizes, tau=(), **changes) -> Config:
    """τ_i steps of full batches, in intervals."""
    config = Config(algorithm=algorithm, num_intervals=200, num_clients=len(sizes))
    config.lr, config.momentum, config.batch_size = 0.1, 0.0, min(sizes)
    config.checkpoint, config.report_every, config.devices = False, 200, 1
    config.eval_every = 200
    config.partition.kind, config.schedule.iteration = "label", "step"
    config.schedule.size_groups = "; ".join(f"constant({n})" for n in sizes)
    if tau:
        config.schedule.kind, config.schedule.tau = "explicit", tau
    for name, value in changes.items():
        *path, last = name.split("__")
        setattr(getattr(config, path[0]) if path else config, last, value)
    return config


def simulate(config, optima, sizes, **parts):
    data = dataset(optima, sizes)
    return tsfl_jax.simulate(config, model=Quadratic((1.0,)), dataset=data, **parts)


def found(result) -> float:
    return float(result.params["params"]["w"][0])


# ---- SCAFFOLD ----


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
def test_with_unequal_sizes_it_ends_at_the_minimum(algorithm):
    # F = ¼·½(w + 1)² + ¾·½(w + 3)²: w* = −2.5, where the plain mean is −2.
    optima, sizes, tau = (-1.0, -3.0), (32, 96), (2, 7)
    result = simulate(settings(algorithm, sizes, tau, mu=1.0), optima, sizes)
    assert found(result) == pytest.approx(-2.5, abs=1e-5)
    plain = simulate(settings("fedavg", sizes, tau), optima, sizes)
    assert found(plain) < -2.6  # does not end there


@pytest.mark.slow
def test_scaffold_in_one_step_is_weighted_sgd():
    # Σ p_i (g_i + c − c_i) = Σ p_i g_i, also when there are control variates.
    all_work, sizes = np.ones_like(TAU), np.broadcast_to([10, 12, 7, 9, 8], TAU.shape)
    hp = HP._replace(momentum=jnp.float32(0), lr=jnp.float32(0.3))
    _, state, _ = run("scaffold", all_work, hp=hp, size=sizes)
    _, plain, _ = run("fedavg", all_work, hp=hp, size=sizes)
    start, other, _ = run("scaffold", TAU, hp=hp, size=sizes)
    close(state.params, plain.params, rtol=1e-5, atol=1e-6)
    moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), state.params, start.params)
    assert max(jax.tree.leaves(moved)) > 1e-2
    assert max(jnp.abs(a).max() for a in jax.tree.leaves(state.server.local)) > 1e-2


def happened(client, steps=None, broadcast=None):
    ones = np.ones(len(client))
    made = received(ones, rho=ones / len(client), client=client, steps=steps)
    return made._replace(broadcast=broadcast)


HPARAMS = problems.hparams(lr=0.5)


def test_of_several_deliveries_in_one_buffer_the_last_decides():
    # Two clients; client 0 delivers three times. c_0⁺ = 0 − 0 − Δ/(η s): 2, 6, 8.
    rule = rules.AGGREGATORS["scaffold"]
    state = rule.server.init({"params": {"w": jnp.zeros(1)}}, Counts(2, 1, jnp.ones(2)))
    updates = {"params": {"w": jnp.array([[-1.0], [-3.0], [-2.0], [-8.0]])}}
    received = happened([0, 0, 1, 0], [1, 1, 1, 2])
    combine = jax.jit(rule.mixing.combine)
    delta, state = combine(updates, state, received, HPARAMS)
    assert state.local["w"].tolist() == [[8], [4]]
    assert state.common["w"].tolist() == [6]
    assert delta["params"]["w"].tolist() == [-3.5]
    # One that is lost does not decide.
    lost = received._replace(present=jnp.array([True, True, True, False]))
    start = rule.server.init({"params": {"w": jnp.zeros(1)}}, Counts(2, 1, jnp.ones(2)))
    _, state = combine(updates, start, lost, HPARAMS)
    assert state.local["w"].tolist() == [[6], [4]]


def test_the_control_variates_are_those_of_the_download():
    # c has become 5 since the download, when it was 1: c_0⁺ = 2 − 1 + 4/(0.5·2) = 5.
    rule = rules.AGGREGATORS["scaffold"]
    own, size = {"w": jnp.array([[2.0], [8.0]])}, jnp.ones(2)
    state = ByClient(own, size, jnp.float32(0), {"w": jnp.array([5.0])})
    broadcast = {"w": jnp.array([[1.0]])}
    correction = rule.clients.gradient_correction(state, {"w": jnp.array([1.0])}, 0)
    assert correction["w"].tolist() == [-1]
    updates = {"params": {"w": jnp.array([[-4.0]])}}
    delivery = happened([0], [2], broadcast)
    _, state = jax.jit(rule.mixing.combine)(updates, state, delivery, HPARAMS)
    assert state.local["w"].tolist() == [[5], [8]]
    assert state.common["w"].tolist() == [6.5]


@pytest.mark.slow  # the buffer by hand is above
def test_scaffold_with_one_client_ten_times_faster():
    # Client 0 delivers several times in one buffer of four.
    sizes, optima = (8, 8, 8, 24), (4.0, 0.0, -1.0, -3.0)
    config = settings("scaffold", sizes, num_intervals=120)
    config.timeline.framework, config.timeline.buffer = "fedbuff", 4
    # A step of the large client takes longer; steps are not scaled by data sizes.
    speeds = [1 * size / 12 for size in sizes]
    speeds[0] /= 10
    config.timeline.speed = "; ".join(f"constant({speed!r})" for speed in speeds)
    config.timeline.local_iterations = 5
    config.schedule.interval_seconds = 10.0
    result = simulate(config, optima, sizes)
    client = draw_workload(config).schedule.client
    assert ((client == 0).sum(axis=1) >= 3).any()
    assert np.nanmax(result.history["train_loss"]) < 100
    # w* = (4 + 0 − 1 − 3·3)/6.
    assert found(result) == pytest.approx(-1, abs=0.02)


# ---- FedNova ----


def rho(config, **parts):
    sizes = (8, 8, 8, 8)
    result = simulate(config, (1.0, 2.0, 3.0, 4.0), sizes, **parts)
    return np.asarray(result.history["rho"])[0]


def shares(work):
    return np.mean(work) / 4 / np.array(work) * 1.0


STEPS = (1, 2, 4, 8)


@pytest.mark.slow
def test_fednova_divides_by_the_work_of_a_proximal_client():
    momentum = 0.9
    config = settings("fednova", (8,) * 4, STEPS, momentum=momentum, num_intervals=1)
    config.eval_every = config.report_every = 1
    config.proximal, config.mu = True, 3.0
    expected, plain = (
        shares([reference.times_counted(s, momentum, alpha) for s in STEPS])
        for alpha in (0.1 * 3.0, 0.0)
    )
    assert np.abs(expected / plain - 1).max() > 0.2
    np.testing.assert_allclose(rho(config), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("algorithm", "part"), [("fednova", "optimizer"), ("scaffold", "client_step")]
)
def test_rules_that_count_on_sgd_refuse_other_steps(algorithm, part):
    config = settings(algorithm, (8,) * 4, STEPS)
    with pytest.raises(UserError, match=f"{algorithm}: it is made for .*{part}="):
        rho(config, **{part: optax.sgd(0.1)})
