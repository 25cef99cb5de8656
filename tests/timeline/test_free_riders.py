"""Free riders: what they do and report, and what rules make of it."""

import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.engine.test_scan import PROBLEM, as_reference
from tests.problems import small
from tests.rules.test_rules import HP, TAU, in_step
from tests.timeline.test_deliveries import SIZES, reference_of, timed
from tsfl_jax.prepare import workload
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.timeline import free_riders
from tsfl_jax.timeline.schedule import complete
from tsfl_jax.types import UserError

HONEST = np.array([[1, 4, 2], [0, 2, 3], [5, 1, 0]])


class Order(np.random.Generator):
    """A generator that chooses free riders in this order."""

    def __init__(self, *order):
        super().__init__(np.random.PCG64())
        self.order = np.array(order)

    def permutation(self, count):
        assert count == len(self.order)
        return self.order


@pytest.mark.parametrize(
    ("kind", "order", "number", "done", "reported"),
    [
        # One iteration where there would be some; the most of any client is 4, 3, 5.
        (
            "claim",
            (0, 2, 1),
            2,
            [[1, 4, 1], [0, 2, 1], [1, 1, 0]],
            [[4, 4, 4], [0, 2, 3], [5, 1, 0]],
        ),
        (
            "echo",
            (1, 0, 2),
            1,
            [[1, 0, 2], [0, 0, 3], [5, 0, 0]],
            [[1, 4, 2], [0, 3, 3], [5, 5, 0]],
        ),
        # Blocks of two: there in 0 and 1, away in 2.
        ("visit", (2, 0, 1), 1, [[1, 4, 2], [0, 2, 3], [5, 1, 0]], None),
        ("visit", (0, 1, 2), 1, [[1, 4, 2], [0, 2, 3], [0, 1, 0]], None),
        *((kind, (0, 1, 2), 0, HONEST.tolist(), None) for kind in ("claim", "echo")),
    ],
)
def test_free_riders_by_hand(kind, order, number, done, reported):
    arguments = HONEST, kind, number, Order(*order)
    work, claims, is_rider = free_riders.make_free_riders(*arguments, period=2)
    assert np.flatnonzero(is_rider).tolist() == sorted(order[:number])
    assert work.tolist() == done and claims.tolist() == (reported or done)
    assert work.dtype == claims.dtype == np.int32


def test_slots_of_deliveries_by_hand():
    # Client 2 of 4 is chosen, whatever its slots; an empty slot names client 0.
    tau = np.array([[2, 3, 0], [4, 2, 1]])
    client = np.array([[2, 1, 0], [3, 2, 2]])
    slots = {"client": client, "num_clients": 4}
    done, reported, chosen = free_riders.make_free_riders(
        tau, "claim", 1, Order(2, 0, 1, 3), **slots
    )
    assert chosen.tolist() == [False, False, True, False]
    assert done.tolist() == [[1, 3, 0], [4, 1, 1]]
    assert reported.tolist() == [[3, 3, 0], [4, 4, 4]]
    done, _, _ = free_riders.make_free_riders(
        tau, "visit", 1, Order(2, 0, 1, 3), 1, **slots
    )
    assert done.tolist() == [[2, 3, 0], [4, 0, 0]]
    with pytest.raises(UserError, match="<= 4 = --config.num_clients"):
        free_riders.make_free_riders(tau, "echo", 5, Order(0, 1, 2, 3), **slots)


@pytest.mark.parametrize(
    ("kind", "number", "words"),
    [
        ("ecco", 1, "did you mean 'echo'"),
        ("echo", 4, "free_riders=4: must be .* <= 3 = --config.num_clients"),
        ("echo", -1, "free_riders=-1"),
    ],
)
def test_wrong_settings_are_answered_in_one_line(kind, number, words):
    with pytest.raises(UserError, match=words):
        free_riders.make_free_riders(HONEST, kind, number, np.random.default_rng(0))


def riding(kind, algorithm, settings=None, number=1):
    settings = settings or small(algorithm=algorithm, num_intervals=4)
    settings.schedule.free_riders = number
    settings.schedule.free_riding = kind
    return settings


def equal_work(kind, seed):
    """All clients would do three local iterations on as many samples."""
    settings = riding(kind, "dms")
    settings.schedule.kind, settings.schedule.tau = "explicit", (3, 3, 3, 5)
    settings.schedule.data_size, settings.seed = 32, seed
    settings.constants = tsfl_jax.sections.ConstantsConfig(40.0, 2.0, 1.0)
    return settings


def free_rider_of(settings):
    times = prepare(settings).workload.schedule
    (free_rider,) = np.flatnonzero((times.reported != times.tau).any(axis=0))
    return free_rider


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.slow) for k in ("claim", "echo")]
)
def test_dms_believes_those_who_report_much(kind):
    # c = η L (H − 1) G²/(2 N σ²) = 0.02 · 40 · 4 · 2/8 = 0.8: ρ grows in τ.
    each = (equal_work(kind, seed) for seed in range(20))
    settings = next(settings for settings in each if free_rider_of(settings) != 3)
    free_rider = free_rider_of(settings)
    result = tsfl_jax.simulate(settings)
    times, rho = prepare(settings).workload.schedule, result.history["rho"]
    assert (times.reported[:, free_rider] == 5).all()
    assert (times.tau[:, free_rider] == (1 if kind == "claim" else 0)).all()
    honest = [i for i in range(3) if i != free_rider]
    # It weighs as much as client 3, who does five iterations, and honest ones less.
    np.testing.assert_allclose(rho[:, free_rider], rho[:, 3], rtol=1e-5)
    assert (rho[:, free_rider] > rho[:, honest].max(axis=1) + 0.1).all()
    work = times.tau.sum(axis=1) * 32
    np.testing.assert_array_equal(result.history["samples"], work)
    assert (
        result.summary["num_discarded"] == 0 and result.summary["diverged_at"] is None
    )


def test_an_echo_is_the_global_model():
    """FedAvg, all but client 2 honest, against the slow reference."""
    done, reported, _ = free_riders.make_free_riders(
        TAU, "echo", 1, Order(2, 0, 1, 3, 4)
    )
    size = np.broadcast_to(SIZES, TAU.shape).astype(np.int32)
    schedule = complete(done, size, reported=reported)
    hp = HP._replace(mu=HP.mu * 0)
    start, state, history = problems.replayed(
        "fedavg", PROBLEM, schedule, hp=hp, iteration="step"
    )
    trace = in_step(TAU)
    trace.iterations, trace.reported = done, reported
    versions = reference_of(start, "fedavg", hp, trace)
    for n, value in versions[-1].items():
        assert np.abs(value - versions[0][n]).max() > 1e-2
        got = as_reference(state.params)[n]
        np.testing.assert_allclose(got, value, rtol=2e-4, atol=2e-5)
    # Its weight is what its samples are worth: 7 of 10 + 12 + 7 + 9.
    np.testing.assert_allclose(history.rho[0, 2], 7 / 38, rtol=1e-6)
    assert history.num_discarded.sum() == 0
    # An interval by echoes alone leaves the model as it is, but for rounding.
    alone = np.array([[0, 0, 4, 0, 0]] * 3, np.int32)
    echoes = complete(alone * 0, size, reported=alone)
    start, state, history = problems.replayed(
        "fedavg", PROBLEM, echoes, hp=HP, iteration="step"
    )
    for n, value in as_reference(start.params).items():
        np.testing.assert_allclose(as_reference(state.params)[n], value, rtol=1e-6)
    assert not history.diverged.any() and history.samples.sum() == 0


def test_free_riders_of_a_timeline_are_clients():
    for framework in ("fedbuff", "sfl"):
        times = workload.draw_workload(riding("echo", "", timed(framework))).schedule
        said = times.reported > 0
        client = np.arange(4)[None].repeat(len(said), 0)
        if times.client is not None:
            client = times.client
        lazy = set(client[said & (times.tau == 0)].tolist())
        assert len(lazy) == 1
        assert (times.tau[np.isin(client, list(lazy))] == 0).all()
        assert (times.tau[said & ~np.isin(client, list(lazy))] > 0).all()


def test_k_of_all_work_is_of_what_clients_report(monkeypatch):
    settings = small(num_intervals=6)
    settings.schedule.kind, settings.schedule.tau = "explicit", (1, 3, 4, 2)
    settings.schedule.upload_above = 1
    settings.dms.threshold = "all"
    assert (workload.draw_workload(settings).schedule.threshold == 2.5).all()
    # Client 0 cannot upload: it does one iteration of its one, or none.
    for kind, least in (("claim", 1), ("echo", 0)):
        riders = riding(kind, "", settings, 4)
        # Four echoes do nothing, which is refused.
        monkeypatch.setattr(workload, "_idle_notes", lambda plan, times: ())
        times = workload.draw_workload(riders).schedule
        assert (times.reported == [0, 4, 4, 4]).all()
        assert (times.threshold == (12 + least) / 4).all()
    # All are away in the second five intervals.
    times = workload.draw_workload(riding("visit", "", settings, 4)).schedule
    assert times.threshold.tolist() == [2.5] * 5 + [0]
