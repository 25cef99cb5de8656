"""Bytes, seconds and joules of timelines worked by hand, and transfers by bandwidth."""

import math

import numpy as np
import pytest

import tsfl_jax
from tests.timeline.test_fleet import draw, file
from tests.timeline.test_timeline import ALL, fleet_of, random_fleet, simulate
from tsfl_jax.config import Config, replace
from tsfl_jax.prepare import prepare, workload
from tsfl_jax.run import identity
from tsfl_jax.timeline import FRAMEWORKS, costs, crowd, segments, ticks
from tsfl_jax.timeline.fleet import exact, online_in, watts
from tsfl_jax.types import UserError

BYTES, WATTS = (100.0, 40.0), "5,1.5,0.2; 10,2,0.5"
# As in test_timeline: 0.5 + 2·1 + 0.5 = 3 s for a task of two, and 0.25 + 6 + 0.75 = 7.
TWO = fleet_of([1.0, 3.0], [0.5, 0.25], [0.5, 0.75])


def spent(name, fleet, end=None, **options):
    """What a framework costs, until its last update unless `end` says otherwise."""
    trace, tasks = simulate(name, fleet, **options)
    done = costs.activities(tasks, fleet)
    power = watts(WATTS, len(fleet.iteration), done.client)
    end = float(trace.time[-1] if end is None else end)
    return done, costs.costs_of(done, BYTES, power, end), power


def numbers(found):
    """Down, up, compute, transfer, idle, joules of each client."""
    columns = np.stack(found[1:6] + found[7:], 1)
    assert not found.offline.any()
    return columns.round(9).tolist()


def test_watts_are_by_group():
    found = watts(WATTS, 5, np.arange(5))
    assert found[:, 0].tolist() == [5, 5, 5, 10, 10]
    assert found[4].tolist() == [10, 2, 0.5]
    boards = watts("raspberry_pi_4; raspberry_pi", 2, np.arange(2))
    assert boards.tolist() == [[5, 1.71, 1.6], [2.7, 2.63, 2.52]]


def test_rounds_by_hand():
    found = spent("sfl", TWO, horizon=20, iterations=2)[1]
    # Two rounds of 7 s. 5·4 + 1.5·2 + 0.2·8 = 24.6 J and 10·12 + 2·2 = 124 J.
    assert numbers(found) == [[200, 80, 4, 2, 8, 24.6], [200, 80, 12, 2, 0, 124]]
    assert found.totals == {
        "bytes_down": 400,
        "bytes_up": 160,
        "energy_joules": pytest.approx(148.6),
    }
    # A lost upload costs as much as one that counts.
    lost = TWO._replace(lost=np.array([[False], [True]]))
    assert numbers(spent("sfl", lost, horizon=20, iterations=2)[1]) == numbers(found)
    # Half a second before the end of the first round two thirds of an upload are left.
    cut = spent("sfl", TWO, end=6.5, horizon=20, iterations=2)[1]
    assert cut.bytes_up.tolist() == pytest.approx([40, 40 / 3])


def test_intervals_by_hand():
    options = {"num_intervals": 2, "carry": False}
    found = spent("tsfl", TWO, interval=4.5, **options)[1]
    # 3.5 s for three iterations and a half, or for one and 0.5 s of another.
    assert numbers(found) == [[200, 80, 7, 2, 0, 38], [200, 80, 7, 2, 0, 74]]
    # Nothing fits into 2.5 s: client 1 stops where an upload would begin.
    found = spent("tsfl", TWO, interval=3.5, **options)[1]
    assert numbers(found)[1] == [200, 0, 5, 0.5, 1.5, 51.75]
    # Nor is an upload of 0 s there without an iteration.
    found = spent("tsfl", TWO._replace(upload=0 * TWO.upload), interval=2.5, **options)
    assert found[1].bytes_up.tolist() == [80, 0]


def test_a_buffer_by_hand():
    work, found, power = spent("fedbuff", TWO, horizon=10, iterations=2, buffer=2)
    # Updates at 6 and 9 s; client 1 delivers at 7 and has begun again.
    assert numbers(found) == [[300, 120, 6, 3, 0, 34.5], [200, 40, 7.75, 1.25, 0, 80]]
    # 0.125 s of downloads of 0.5 and 0.25 s; then a task, and a download.
    first = 1.5 * 1 + 5 * 2 + 2 * 0.25 + 10 * 2.75
    moments = ((0.125, 75, 0, 0.4375), (3, 200, 40, first), (9, 500, 160, 114.5))
    for second, down, up, joules in moments:
        early = costs.costs_of(work, BYTES, power, second).totals
        assert (early["bytes_down"], early["bytes_up"]) == (down, up)
        assert early["energy_joules"] == pytest.approx(joules)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_totals_are_those_of_a_loop_over_tasks(name):
    """With clients that come and go, lost and given-up tasks, and uploads of 0 s."""
    for seed in range(4):
        fleet = random_fleet(seed)
        fleet = fleet._replace(upload=fleet.upload * (seed % 2))
        trace, tasks = simulate(name, fleet, **ALL[name])
        # The whole run, and a part of it.
        end, clients = (0.6, 1.0)[seed < 3] * float(trace.time[-1]), exact(fleet)
        _, found, power = spent(name, fleet, end, **ALL[name])
        seconds = {kind: np.zeros(5) for kind in segments.KINDS}
        for bar in segments.segments(tasks, fleet, end):
            seconds[bar.kind][bar.client] += bar.end - bar.start
        compute = seconds["iteration"] + seconds["unfinished"]
        transfer = seconds["download"] + seconds["upload"]
        idle, close = seconds["waiting"] + seconds["idle"], {"atol": 1e-5}
        np.testing.assert_allclose(found.compute, compute, **close)
        np.testing.assert_allclose(found.transfer, transfer, **close)
        np.testing.assert_allclose(found.idle, idle, **close)
        np.testing.assert_allclose(found.offline, seconds["offline"], **close)
        np.testing.assert_allclose(sum(found[3:7]), end)
        joules = power * np.stack([compute, transfer, idle], 1)
        np.testing.assert_allclose(found.joules, joules.sum(axis=1), rtol=1e-5)
        downloads, uploads, unfinished = np.zeros((3, 5))
        for task in tasks:
            i, k = task.client, task.number % 7
            stop = min(ticks.of(task.stop), ticks.of(end))
            online = online_in(clients, i, ticks.of(task.start), stop)
            passed = sum(b - a for a, b in online) / ticks.SECOND
            downloads[i] += min(passed / fleet.download[i, k], 1)
            is_sent = task.stop == task.arrival <= end and task.iterations > 0
            uploads[i] += is_sent
            unfinished[i] += not is_sent
        np.testing.assert_allclose(found.bytes_down, 100 * downloads, rtol=1e-6)
        assert (found.bytes_up <= 40 * (uploads + unfinished) + 1e-6).all()
        assert (found.bytes_up >= 40 * uploads - 1e-6).all() and uploads.any()
        if name == "sfl" and not seed % 2:  # an upload in no time is there or not
            np.testing.assert_allclose(found.bytes_up, 40 * uploads)


def test_who_is_not_asked_to_upload_has_sent_nothing():
    """Of two clients one uploads in each round; the other keeps what it has."""
    fleet = fleet_of([1.0, 1.0], 0.0, 1.0)
    options = {"horizon": 6, "iterations": 1, "fraction": 0.5, "lag": 9}
    trace, _ = simulate("cached", fleet, **options)
    found = spent("cached", fleet, **options)[1]
    counted = np.bincount(trace.client.ravel(), minlength=2)
    assert found.bytes_up.tolist() == (40.0 * counted).tolist()


# ---- Bandwidth ----


def test_seconds_of_a_transfer_by_hand():
    plain = {"jitter": 0.3, "upload": ("uniform(0,1)",)}
    sent = {"bandwidth_down": ("constant(100)", "constant(50)")}
    sent |= {"download": ("constant(0.5)",), "transfer_bytes": (200.0, 80.0)}
    fleet = draw(4, **plain, **sent)
    # 0.5 + 200/100 and 0.5 + 200/50, under the jitter of any other transfer.
    same = draw(4, **plain, download=("constant(2.5)", "constant(4.5)"))
    for one, other in zip(fleet[:4], same[:4], strict=True):
        np.testing.assert_array_equal(one, other)
    free = draw(4, **plain, download=("uniform(0,1)",), transfer_bytes=(200.0, 80.0))
    for one, other in zip(
        free, draw(4, **plain, download=("uniform(0,1)",)), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_bandwidth_from_a_file(tmp_path):
    head = "client,seconds,bandwidth_up,bandwidth_down\n"
    path = file(tmp_path, head + "0,1,20,\n1,1,1e300,400\n")
    fleet = draw(2, speeds_file=path, transfer_bytes=(200.0, 80.0))
    assert fleet.upload[:, 0].tolist() == pytest.approx([4, 0], abs=1e-200)
    assert fleet.download[:, 0].tolist() == [0, 0.5]
    # Nearly no limit is the fleet without one.
    path = file(tmp_path, head + "0,1,1e300,1e300\n1,1,1e300,1e300\n")
    times = {"jitter": 0.3, "upload": ("uniform(0,1)",), "download": ("uniform(0,1)",)}
    fast = draw(2, speeds_file=path, transfer_bytes=(200.0, 80.0), **times)
    slow = draw(2, **times, speed=("constant(1)",))
    for one, other in zip(fast, slow, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_crowd_of_all_is_the_fleet():
    groups = {"speed": ("constant(1)", "constant(2)"), "upload": ("constant(0.5)",)}
    groups |= {"bandwidth_up": ("constant(40)", "constant(80)")}
    both = {"transfer_bytes": BYTES, "jitter": 0.0, "dropout": 0.0}
    everyone = crowd.make_crowd(4, 0, num_samples=np.full(4, 9), seconds=groups, **both)
    fleet = draw(4, [9] * 4, **groups, **both)
    for one, other in zip(
        crowd.fleet_of(everyone, np.arange(4), 8)[:4], fleet[:4], strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert fleet.upload[:, 0].tolist() == [1.5, 1.5, 1, 1]


# ---- Experiments, without training ----

PLAIN = {"num_clients": 4, "batch_size": 8, "num_intervals": 6, "model.hidden": 8}
PLAIN |= {"schedule.data_size": 32, "schedule.interval_seconds": 4.0}
PLAIN |= {"timeline.speed": "constant(0.5)", "algorithm": "fedavg"}
UP = {"timeline.bandwidth_up": "constant(1220)"}  # 4·610 bytes in 2 s


def planned(framework, **changes):
    named = {name.replace("__", "."): value for name, value in changes.items()}
    named = PLAIN | {"timeline.framework": framework} | named
    return tsfl_jax.explain(replace(Config(), named))


def test_compression_leaves_time_for_more_work():
    """k = 61 of 610 entries, each of 32 + 10 bits: 320.25 bytes in 0.2625 s."""
    topk = UP | {"uplink.chain": "topk", "topk.fraction": 0.1}
    topk = {name.replace(".", "__"): value for name, value in topk.items()}
    whole = {"timeline__bandwidth_up": "constant(1220)"}
    # (4 − 2)/0.5 = 4 iterations, (4 − 0.2625)/0.5 = 7.475.
    plain, short = planned("tsfl", **whole), planned("tsfl", **topk)
    assert (plain.schedule.tau == 4).all() and (short.schedule.tau == 7).all()
    assert plain.costs.totals == {"bytes_down": 4 * 6 * 2440, "bytes_up": 4 * 6 * 2440}
    assert short.costs.totals["bytes_up"] == 4 * 6 * 320.25
    assert short.costs.transfer.tolist() == pytest.approx([6 * 0.2625] * 4)
    # Tasks of 1 + 2 = 3 s, and of 1.2625 s, in 24 s.
    options = {"timeline__buffer": 4, "timeline__local_iterations": 2}
    updates = [
        len(planned("fedbuff", **options, **more).schedule.tau)
        for more in (whole, topk)
    ]
    assert updates == [8, 19]
    # FedAvg's control variates are none; those of SCAFFOLD are not compressed.
    for algorithm, variates in (("fedavg", 0), ("scaffold", 2 * 2440)):
        made = planned("tsfl", **topk | {"algorithm": algorithm}).prepared
        sent = identity.labels_of(made)["bytes_per_delivery"]
        assert sent == round(2440 + 320.25 + variates)


def test_frozen_parameters_are_not_sent():
    """Of 610 parameters the head has 90."""
    frozen = {"model__frozen": "Dense_0"}
    assert planned("tsfl", **frozen).prepared.workload.transfer_bytes == (360, 360)
    topk = frozen | {"uplink__chain": "topk", "topk__fraction": 0.1}
    down, up = planned("tsfl", **topk).prepared.workload.transfer_bytes
    # 9 values, and ⌈log2 90⌉ = 7 bits for the place of each.
    assert (down, up) == (360, 9 * (32 + 7) / 8)


def test_periodic_layers_take_the_mean_over_the_intervals():
    """Of 610 parameters the head's 90 go up in 2 of 6 intervals and down in 1."""
    period = {"model__local": "Dense_1", "model__local_period": 3}
    down, up = planned("tsfl", **period).prepared.workload.transfer_bytes
    assert (down, up) == pytest.approx((4 * (520 + 90 / 6), 4 * (520 + 90 / 3)))


def test_cohorts_of_all_cost_what_the_fleet_costs():
    changes = {"timeline__power": WATTS, "timeline__bandwidth_down": "constant(4880)"}
    for framework in ("sfl", "tsfl", "fedbuff"):
        more = {"timeline__buffer": 4} if framework == "fedbuff" else {}
        fleet = planned(framework, **changes, **more).costs
        asked = planned(framework, **changes, **more, cohort__size=4).costs
        for one, other in zip(fleet, asked, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-9)
    few = planned("sfl", **changes, cohort__size=1, num_clients=40, num_intervals=3)
    ever = np.unique(few.prepared.workload.trace.client)
    np.testing.assert_array_equal(few.costs.client, ever)
    assert 1 < len(ever) < 40


def test_without_a_clock_only_bytes_are_known():
    plan = planned("none", timeline__speed="uniform(0.25,1)")
    uploads = (plan.schedule.tau > 0).sum(axis=0)
    np.testing.assert_array_equal(plan.costs.bytes_up, 2440 * uploads)
    assert np.isnan(plan.costs.joules).all() and "kJ" not in str(plan)


def test_results_of_a_run_have_its_costs():
    named = PLAIN | UP | {"timeline.framework": "tsfl", "timeline.power": WATTS}
    config = replace(Config(), named | {"devices": 1, "num_intervals": 2})
    result = tsfl_jax.sweep(config, {"seed": [0]})
    (row,), table = result.rows, result.to_xarray()
    # 2 s of 4 are uploads: 2·(2·5 + 2·1.5) and 2·(2·10 + 2·2) joules, two clients each.
    assert row["energy_joules"] == pytest.approx(2 * (2 * 13 + 2 * 24))
    sent = {"bytes_up": 8 * 2440, "bytes_down": 8 * 2440, "bytes_moved": 16 * 2440}
    assert {n: row[n] for n in sent} == sent
    assert table["bytes_up"].item() == 8 * 2440 and table["bytes_up"].units == "B"
    assert table["energy_joules"].item() == row["energy_joules"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"timeline.power": "5,1.5"}, "'5,1.5': expected watts of compute"),
        ({"timeline.power": "1,2,x"}, "power=1,2,x"),
        ({"timeline.power": "1,2,-3"}, "finite and >= 0"),
        ({"timeline.power": ";".join(["1,1,1"] * 5)}, "timeline.power has 5 entries"),
        ({"timeline.bandwidth_up": "constant(0)"}, "gets 0 B/s"),
        ({"timeline.bandwidth_up": "fast(1)"}, "timeline.bandwidth_up: 'fast(1)'"),
        ({"timeline.framework": "none"}, "bandwidth_up=constant(1220): would be"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    named = PLAIN | UP | {"timeline.framework": "sfl"}
    if changes.get("timeline.framework") == "none":
        del named["timeline.speed"]
    with pytest.raises(UserError) as error:
        prepare.prepare(replace(Config(), named | changes))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_bandwidth_needs_bytes():
    config = replace(Config(), PLAIN | UP | {"timeline.framework": "sfl"})
    with pytest.raises(UserError, match="need the bytes of a transfer"):
        workload.draw_workload(config)
    drawn = workload.draw_workload(config, transfer_bytes=(0.0, 1220.0))
    assert (drawn.fleet.upload == 1).all() and math.isclose(drawn.trace.time[0], 3.0)
