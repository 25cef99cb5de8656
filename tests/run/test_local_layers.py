"""Layers that stay on the client: FedBN, FedPer.

That such runs resume, and are the same in sweeps and on devices: `test_same_bits`.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import tsfl_jax
from tests import problems
from tsfl_jax.prepare import prepare
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.trees import named
from tsfl_jax.types import UserError

HEAD, BODY = "Dense_1", "Dense_0"
TAU = (1, 2, 3, 4)


SMALL = {
    "hidden": 5,
    "num_intervals": 3,
    "report_every": 1,
    "batch_size": 64,
    "lr": 0.1,
    "schedule__data_size": 32,
    "schedule__kind": "explicit",
    "schedule__tau": TAU,
    "partition__kind": "shards",
    "evaluation__clients": "labels",
    "model__local": HEAD,
}


def config_of(algorithm="fedavg", **changes):
    return problems.small(**SMALL | {"algorithm": algorithm} | changes)


def of_client(result, place):
    """The variables of one client, by path."""
    own = {n: a[place] for n, a in result.own.items() if n != "client"}
    return named(result.params) | own


def equal(one, other, atol=1e-6):
    return one.keys() == other.keys() and all(
        np.allclose(one[n], other[n], atol=atol) for n in one
    )


@pytest.mark.slow
def test_heads_over_a_frozen_body_train_alone():
    """Then no client sees another: each is a run of its own, on all its samples."""
    config = config_of(model__frozen=BODY)
    together = tsfl_jax.simulate(config)
    split = prepare.prepare(config).partition
    for client, tau in [*enumerate(TAU)][1::2]:
        rows = split.indices[client][: split.capacity[client]]
        plain = {"model__frozen": BODY, "model__local": "", "schedule__tau": (tau,)}
        alone = config_of(num_clients=1, schedule__data_size=None, **plain)
        found = tsfl_jax.simulate(alone, partition=[rows])
        assert equal(of_client(together, client), named(found.params), 1e-5)


@pytest.mark.slow
def test_scores_are_those_of_the_clients_models():
    """Each one's accuracy by class on the test set, by its own mix of labels."""
    config = config_of()
    result, prepared = tsfl_jax.simulate(config), prepare.prepare(config)
    data, split = prepared.dataset, prepared.partition
    each, whole = [], []
    for client in range(4):
        flat = of_client(result, client)
        params = traverse_util.unflatten_dict(flat, sep="/")
        right = tsfl_jax.predict(config, params)[0].argmax(1) == data.y_test
        labels = data.y_train[split.indices[client][: split.capacity[client]]]
        share = np.bincount(labels, minlength=10) / len(labels)
        by_class = [right[data.y_test == c].mean() for c in range(10)]
        each.append(share @ by_class)
        whole.append(right.mean())
    history = result.history
    assert np.isclose(history["client_accuracy_mean"][-1], np.mean(each), atol=1e-5)
    assert np.isclose(history["client_accuracy_worst"][-1], min(each), atol=1e-5)
    assert np.isclose(history["test_accuracy"][-1], np.mean(whole), atol=1e-5)


@functools.cache
def start():
    """w^0: nothing moves with an η of nearly 0."""
    return tsfl_jax.simulate(config_of(num_intervals=1, lr=1e-30)).params


QUICK = ("oracle", "dms_adaptive")
SLOW_RULES = [name for name in AGGREGATORS if name not in QUICK]


@pytest.mark.parametrize(
    "algorithm",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_RULES)],
)
def test_under_every_rule_they_stay(algorithm):
    """The global model keeps w^0 there, clients do not, and the rest is aggregated."""
    mixing = AGGREGATORS[algorithm].mixing
    config = config_of(algorithm, data__validation=100 * mixing.uses_validation)
    if mixing.uses_validation or mixing.uses_gradients:
        with pytest.raises(UserError, match="says nothing alone"):
            tsfl_jax.simulate(config)
        return
    first = named(start())
    result = tsfl_jax.simulate(config)
    # Optax's Yogi begins with a mean of 1e-6, which moves what nobody reads.
    for name, leaf in named(result.params).items():
        if not (HEAD in name and algorithm == "fedyogi"):
            assert np.allclose(leaf, first[name], atol=1e-6) == (HEAD in name), name
    for name, leaves in result.own.items():
        if name != "client":
            assert all(not np.array_equal(leaf, first[name]) for leaf in leaves)


def buffered(algorithm="fedbuff", **settings):
    """FedBuff whose fastest client delivers twice or three times in a buffer."""
    timeline = {
        "num_intervals": 6,
        "num_clients": 3,
        "momentum": 0.0,
        "schedule__kind": "case3",
        "schedule__tau": (),
        "schedule__interval_seconds": 1.0,
        "timeline__framework": "fedbuff",
        "timeline__buffer": 3,
        "timeline__local_iterations": 2,
        "timeline__speed": "constant(1);constant(1.3);constant(0.3)",
    }
    return config_of(algorithm, **timeline | settings)


def local_loss(params, x, y):
    hidden = jax.nn.relu(x @ params[f"{BODY}/kernel"] + params[f"{BODY}/bias"][None])
    logits = hidden @ params[f"{HEAD}/kernel"] + params[f"{HEAD}/bias"][None]
    return -jax.nn.log_softmax(logits)[jnp.arange(len(y)), y].mean()


def in_order_of_delivery(config, centre):
    """(global model, head of each client) by a loop over the tasks of the trace.

    Of the updates of a buffer `centre` is added. A client has one mini-batch.
    """
    prepared = prepare.prepare(config)
    data, split, trace = prepared.dataset, prepared.partition, prepared.workload.trace
    x = (data.x_train.reshape(len(data.x_train), -1) - data.mean) / data.std
    gradient = jax.jit(jax.grad(local_loss))
    first = {n.removeprefix("params/"): w for n, w in named(start()).items()}
    versions = [first]
    heads = [{n: w for n, w in first.items() if HEAD in n} for _ in range(3)]
    for clients, bases in zip(trace.client, trace.version, strict=True):
        updates = []
        for i, version in zip(clients, bases, strict=True):
            rows = split.indices[i][: split.capacity[i]]
            base = versions[version] | heads[i]
            model = dict(base)
            for _ in range(2):
                slope = gradient(model, x[rows], data.y_train[rows])
                model = {n: w - 0.1 * slope[n] for n, w in model.items()}
            heads[i] = {n: model[n] for n in heads[i]}
            updates.append({n: model[n] - base[n] for n in model if HEAD not in n})
        moved = {n: centre([u[n] for u in updates], 0) for n in updates[0]}
        new = {n: w + moved[n] for n, w in versions[-1].items() if n in moved}
        versions.append(versions[-1] | new)
    return versions[-1], heads


@pytest.mark.parametrize(
    ("algorithm", "centre", "settings"),
    [("fedbuff", np.mean, {}), ("median", np.median, {"mapping": "vmap"})],
)
@pytest.mark.slow
def test_a_second_task_in_a_buffer_follows_the_first(algorithm, centre, settings):
    config = buffered(algorithm, **settings)
    result = tsfl_jax.simulate(config)
    model, heads = in_order_of_delivery(config, centre)
    params = {f"params/{n}": w for n, w in model.items()}
    assert equal(named(result.params), params, 1e-6)
    for place, head in enumerate(heads):
        local = {f"params/{n}": w for n, w in head.items()}
        assert equal(of_client(result, place), params | local, 1e-6)


class Normalized(nn.Module):
    """One hidden layer with batch normalization."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(5)(x.reshape(len(x), -1))
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(10)(nn.relu(x))


def test_fedbn_keeps_parameters_and_statistics_of_normalization():
    config = config_of(hidden=None, model__local="BatchNorm", batch_size=8)
    found = tsfl_jax.simulate(config, model=Normalized())
    names = {"bias", "mean", "scale", "var"}
    assert {n.rsplit("/")[-1] for n in found.own if n != "client"} == names
    statistics = found.own["batch_stats/BatchNorm_0/mean"]
    assert len(np.unique(statistics.round(6), axis=0)) == 4
    shared = named(found.params)["batch_stats/BatchNorm_0/mean"]
    assert not shared.any()  # those of w^0
    sent, deliveries = found.summary["num_parameters"] - 2 * 5, 3 * 4
    assert found.summary["bytes_moved"] == deliveries * 2 * 4 * sent


# ---- Layers that are sent in every P-th interval ----


def periodic(period, **settings):
    """Clients of unequal sizes, none of them scored."""
    fixed = {"evaluation__clients": "none", "num_intervals": 6, "momentum": 0.0}
    return config_of(**fixed | {"model__local_period": period} | settings)


@pytest.mark.slow
def test_a_period_by_runs_of_the_clients():
    """P = 3: three intervals of the client alone, then a mean of the heads.

    With a frozen body, so that a client needs nothing of the others in between.
    """
    settings = {"model__frozen": BODY, "schedule__tau": (2,)}
    config = periodic(3, **settings)
    found = tsfl_jax.simulate(config)
    split = prepare.prepare(config).partition
    lists = [row[:n] for row, n in zip(split.indices, split.capacity, strict=True)]
    assert len(lists) == 4
    # w^3 is the mean of the clients' heads at the end of interval 2: of runs that
    # never send them, whose streams are the same.
    alone = tsfl_jax.simulate(
        periodic(0, **settings, evaluation__clients="labels", num_intervals=3)
    )
    half = tsfl_jax.simulate(periodic(3, **settings, num_intervals=3))
    sizes = split.capacity / split.capacity.sum()
    for name, values in alone.own.items():
        if name != "client":
            mean = np.tensordot(sizes, values, 1)
            np.testing.assert_allclose(named(half.params)[name], mean, atol=1e-6)
    # Between uploads the global head stays as it was.
    four = tsfl_jax.simulate(periodic(3, **settings, num_intervals=4))
    head = f"params/{HEAD}/kernel"
    assert (named(four.params)[head] == named(half.params)[head]).all()
    assert (named(found.params)[head] != named(half.params)[head]).any()
    # All begin interval 3 from that mean, so heads after it are near each other.
    spread = [np.ptp(result.own[head], axis=0).max() for result in (half, four)]
    assert spread[1] < 0.7 * spread[0]


def test_bytes_of_a_period():
    found = tsfl_jax.simulate(periodic(3))
    sizes = {n: a.size for n, a in named(found.params).items()}
    deep = sum(size for n, size in sizes.items() if HEAD in n)
    shallow = sum(sizes.values()) - deep
    # Six intervals of four clients; the head goes up in two of them, down in one.
    expected = 4 * 4 * (6 * 2 * shallow + (2 + 1) * deep)
    assert found.summary["bytes_moved"] == expected
