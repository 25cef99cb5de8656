"""Attackers: who they are, what they send, train on and claim; who survives them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests import problems
from tests.problems import small
from tests.rules.test_rules import received, weights
from tsfl_jax.components import arrays
from tsfl_jax.config import replace
from tsfl_jax.data import poison
from tsfl_jax.prepare import prepare
from tsfl_jax.timeline import attackers
from tsfl_jax.timeline.attackers import AttackConfig
from tsfl_jax.uplink import attack
from tsfl_jax.uplink.link import LinkInfo

# ---- Who attacks ----


def drawn(seed, number, share, kind="scale"):
    settings = AttackConfig(kind=kind, share=share)
    return np.flatnonzero(attackers.draw(seed, number, settings))


def test_who_attacks_follows_from_seed_and_client():
    assert len(drawn(0, 20, 0.0)) == len(drawn(0, 20, 0.3, "none")) == 0
    groups = [drawn(0, 20, share) for share in (0.024, 0.05, 0.1, 0.3)]
    assert [*map(len, groups)] == [0, 1, 2, 6]  # rounded to whole clients
    for few, several in zip(groups, groups[1:], strict=False):
        assert {*few} < {*several}
    assert len(drawn(0, 10**6, 0.1)) == 10**5
    chosen = [tuple(drawn(seed, 20, 0.3)) for seed in range(20)]
    assert len({*chosen}) > 15
    # Each client in about 30 % of the seeds.
    often = np.bincount(np.ravel([drawn(s, 20, 0.3) for s in range(400)]))
    assert often.min() > 90 and often.max() < 150


ATTACK = {"attack__kind": "sign_flip", "attack__share": 0.3, "num_clients": 40}
ATTACK |= {"schedule__data_size": 20}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"schedule__kind": "case1", "num_intervals": 3},
        {"timeline__framework": "fedbuff", "algorithm": "fedbuff"},
        {"cohort__size": 5, "partition__kind": "iid"},
    ],
)
def test_neither_framework_nor_cohort_changes_who_attacks(changes):
    workload = prepare.prepare(small(**ATTACK | changes)).workload
    there = workload.drawn[workload.attackers]
    np.testing.assert_array_equal(there, np.intersect1d(drawn(0, 40, 0.3), there))
    assert len(there) == 12 or changes.get("cohort__size")
    assert "12 of 40 clients attack (sign_flip)" in workload.schedule.notes[-1]


def test_a_claim_is_reported_and_raises_the_weight():
    """Of a client that works; DMS gives weight by it."""
    settings = ATTACK | {"schedule__kind": "case1", "attack__claim": 9}
    times = prepare.prepare(small(**settings)).workload.schedule
    attacks = np.isin(times.client, drawn(0, 40, 0.3))
    assert (times.reported[attacks] == 9).all() and times.tau.max() == 4
    assert (times.reported[~attacks] == -1).all()
    claimed = received(np.where(attacks, 9, times.tau)[0])
    rho = weights("dms", claimed, coupling=0.01, drop=0.0)
    assert rho[attacks[0]].min() > rho[~attacks[0]].max()


# ---- What attackers send ----

U = {"params": {"a": jnp.array([3.0]), "b": jnp.array([-4.0])}}  # ‖u‖/√2 = 3.5355


@pytest.mark.parametrize(
    ("kind", "strength", "expected"),
    [
        ("sign_flip", 0.0, [-3, 4]),
        ("sign_flip", 2.0, [-6, 8]),
        ("scale", 0.0, [30, -40]),
        ("constant", 2.0, [7.0711, 7.0711]),
        ("gaussian", 2.0, None),
    ],
)
def test_single_attackers_by_hand(kind, strength, expected):
    settings = arrays(AttackConfig(kind=kind, share=0.5, strength=strength))
    key = jax.random.key(3)
    info = LinkInfo(key, jnp.int32(0), U, U, is_attacker=jnp.bool_(True))
    if expected is None:
        expected = 7.0711 * jax.random.normal(key, (2,))
    sent, _ = attack.send(U, (), info, settings)
    np.testing.assert_allclose(
        jnp.concatenate([*sent["params"].values()]), expected, 1e-4
    )
    honest, _ = attack.send(
        U, (), info._replace(is_attacker=jnp.bool_(False)), settings
    )
    problems.same_bits(honest, U)


collude = jax.jit(attack.collude)


def test_colluding_attackers_by_hand():
    """Two honest updates, mean (2, 2), deviation (1, 2); the fourth is not there."""
    updates = {"w": jnp.array([[1.0, 0], [3, 4], [90, 90], [70, 70]])}
    present = jnp.array([True, True, True, False])
    is_attacker = jnp.array([False, False, True, True])

    def sent(is_attacker=is_attacker, **settings):
        settings = arrays(AttackConfig(share=0.5, **settings))
        return collude(updates, present, is_attacker, settings)["w"]

    np.testing.assert_allclose(sent(kind="ipm")[2], [-1, -1])
    alie = sent(kind="alie", strength=1.5)
    np.testing.assert_allclose(alie, [[1, 0], [3, 4], [0.5, -1], [70, 70]])
    # n = 3, m = 1: s' = 1, z = Φ⁻¹(1/2) = 0.
    np.testing.assert_allclose(sent(kind="alie")[2], [2, 2], atol=1e-6)
    nobody = sent(jnp.ones(4, bool), kind="ipm")  # to hide among: as they are
    np.testing.assert_array_equal(nobody, updates["w"])
    # The example of the paper's section 3: n = 50, m = 24, s' = 2, Φ⁻¹(24/26).
    assert attack.largest_z(jnp.int32(50), jnp.int32(24)) == pytest.approx(1.4261, 1e-3)


# A linear regression with full batches: what a client does is plain gradient descent.
NUM, SIZE, LR, T, BAD = 5, 12, 0.1, 5, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM * SIZE + 8, 6)).astype(np.float32)
Y = (X @ RNG.normal(size=6) + RNG.normal(size=len(X)))[:, None].astype(np.float32)
TAU = (1, 3, 2, 1, 2)
PARTS = np.arange(NUM * SIZE).reshape(NUM, SIZE)
KINDS = [("sign_flip", 2.0), ("alie", 0.7), ("ipm", 0.6)]
PARTS_OF_RUN = {
    "model": nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros),
    "dataset": tsfl_jax.make_dataset(X[: NUM * SIZE], Y[: NUM * SIZE], X, Y),
    "partition": [list(rows) for rows in PARTS],
}


def regression(**settings):
    config = {"num_intervals": T, "num_clients": NUM, "lr": LR, "momentum": 0.0}
    config |= {"batch_size": SIZE, "devices": 1, "attack.share": BAD / NUM}
    config |= {"schedule.kind": "explicit", "schedule.tau": TAU}
    return replace(tsfl_jax.Config(), config | settings)


def descended(w, rows, steps):
    """The update of plain gradient descent on the mean squared error."""
    x, y, start = X[rows].astype(float), Y[rows, 0].astype(float), w
    for _ in range(steps):
        w = w - 2 * LR * x.T @ (x @ w - y) / len(x)
    return w - start


@pytest.mark.parametrize(
    "rule", [pytest.param("fedavg", marks=pytest.mark.slow), "median"]
)
def test_intervals_are_those_of_numpy(rule):
    points = [{"attack.kind": kind, "attack.strength": s} for kind, s in KINDS]
    swept = tsfl_jax.sweep(regression(algorithm=rule), points, **PARTS_OF_RUN)
    chosen = drawn(0, NUM, BAD / NUM)
    honest = np.setdiff1d(np.arange(NUM), chosen)
    for number, (kind, s) in enumerate(KINDS):
        w, losses = np.zeros(6), []
        for _ in range(T):
            u = np.stack([descended(w, PARTS[i], TAU[i]) for i in range(NUM)])
            if kind == "sign_flip":
                u[chosen] *= -s
            elif kind == "alie":
                u[chosen] = u[honest].mean(axis=0) - s * u[honest].std(axis=0)
            else:
                u[chosen] = -s * u[honest].mean(axis=0)
            w = w + (u.mean(axis=0) if rule == "fedavg" else np.median(u, axis=0))
            losses.append(((X.astype(float) @ w - Y[:, 0]) ** 2).mean())
        np.testing.assert_allclose(swept.history["test_loss"][number], losses, 1e-4)


# ---- What attackers train on ----


def test_poisoned_samples_by_hand():
    x = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3, 1)
    dataset = tsfl_jax.make_dataset(
        x, np.array([0, 1, 2, 2]), x, np.array([0, 1, 2, 1])
    )
    split = tsfl_jax.types.Partition(np.array([[0, 1], [2, 3]]), np.array([2, 2]), ())
    attacks = np.array([False, True])

    def poisoned(**settings):
        settings = AttackConfig(share=0.5, **settings)
        return poison.poisoned(dataset, split, attacks, settings, 200)

    flipped, rows = poisoned(kind="label_flip")
    np.testing.assert_array_equal(flipped.y_train, [0, 1, 2, 2, 2, 1, 0, 0])
    np.testing.assert_array_equal(flipped.x_train, np.concatenate([x, x]))
    np.testing.assert_array_equal(rows.indices, [[0, 1], [6, 7]])
    stamped, rows = poisoned(kind="backdoor", target=1)
    np.testing.assert_array_equal(rows.indices, [[0, 1], [2, 7]])  # half of its samples
    np.testing.assert_array_equal(stamped.y_train, [0, 1, 2, 2, 1, 1, 1, 1])
    image = stamped.x_train[7, :, :, 0]
    np.testing.assert_array_equal(image, [[27, 28, 29], [30, 200, 200], [33, 200, 200]])
    problems.same_bits(stamped.x_test, x)
    assert poisoned(kind="scale") == (dataset, split)
    # Three test images are of other classes; the outputs take one of those for class 1.
    ((_, metric),) = poison.success_of(dataset, AttackConfig("backdoor", 0.5, target=1))
    outputs = jnp.eye(3)[jnp.array([1, 1, 0, 1])]
    hits, counts = metric.metric(outputs, jnp.array([0, 1, 2, 1]))
    assert hits.tolist() == [True, False, False, False]
    assert counts.tolist() == [True, False, True, False]


def test_a_backdoor_is_scored_on_images_with_the_pattern():
    """Against predictions of the model that a run leaves."""
    settings = {"attack__kind": "backdoor", "attack__share": 0.5, "attack__target": 3}
    config = small(algorithm="fedavg", lr=0.1, num_intervals=10, hidden=32, **settings)
    result = tsfl_jax.simulate(config)
    data = prepare.load_dataset(config)
    images = data.x_test.copy()
    images[:, -2:, -2:] = 16
    plain, data = small(hidden=32), data._replace(x_test=images)
    outputs, _ = tsfl_jax.predict(plain, result.params, dataset=data)
    chosen = outputs.argmax(axis=1)
    expected = (chosen[data.y_test != 3] == 3).mean()
    assert result.summary["final_attack_success"] == pytest.approx(expected, 1e-5)
    assert expected > 0.5


# ---- Runs ----


def test_without_a_share_nothing_changes_and_a_sweep_has_the_single_runs():
    shares = [0.0, 0.5]
    settings = {"algorithm": "fedavg", "num_intervals": 3, "attack__kind": "gaussian"}
    swept = tsfl_jax.sweep(small(**settings), {"attack.share": shares})
    attacked = small(**settings, attack__share=0.5)
    plain = small(algorithm="fedavg", num_intervals=3)
    for losses, config in zip(
        swept.history["test_loss"], (plain, attacked), strict=True
    ):
        one = tsfl_jax.simulate(config)
        np.testing.assert_array_equal(losses, one.history["test_loss"])


@pytest.mark.slow
def test_robust_rules_survive_where_the_mean_does_not():
    settings = {"attack__kind": "sign_flip", "attack__strength": 5.0, "report_every": 0}
    settings |= {"attack__share": 0.2, "num_clients": 10, "num_intervals": 20}
    settings |= {"lr": 0.05, "hidden": 16, "partition__kind": "iid"}
    accuracy = {}
    for rule in ("fedavg", "median", "multi_krum"):
        trim = {"krum__trim": 0.2} if rule == "multi_krum" else {}
        config = small(algorithm=rule, **settings, **trim)
        swept = tsfl_jax.sweep(config, {"seed": [0, 1, 2]})
        accuracy[rule] = swept.history["test_accuracy"][:, -1]
    for rule in ("median", "multi_krum"):  # with each seed, by 30 points
        assert (accuracy[rule] > np.nan_to_num(accuracy["fedavg"]) + 0.3).all(), (
            accuracy
        )
