"""Compressed updates: by hand, in the mean, and ten intervals against NumPy."""

import itertools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tsfl_jax import components
from tsfl_jax.config import replace
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.timeline import attackers
from tsfl_jax.types import HParams, UserError
from tsfl_jax.uplink import UPLINKS, attack, chain, quantize, sparse
from tsfl_jax.uplink.link import LinkInfo, Traffic

V = jnp.array([3.0, -1.0, 2.0, 0.0, -2.0])
KEY = jax.random.key(0)


def test_by_hand():
    largest = sparse.topk(V, KEY, sparse.TopK(fraction=0.5))  # k = ⌈2.5⌉
    np.testing.assert_array_equal(largest, [3, 0, 2, 0, -2])
    # Of equal entries the first, and never none.
    np.testing.assert_array_equal(
        sparse.topk(V, KEY, sparse.TopK(fraction=0.4)), [3, 0, 2, 0, 0]
    )
    np.testing.assert_array_equal(
        sparse.topk(V, KEY, sparse.TopK(fraction=0.01)), [3, 0, 0, 0, 0]
    )
    scaled = quantize.signs(V, KEY, quantize.Sign())  # ‖v‖₁ of four = 8/4
    np.testing.assert_allclose(scaled, [2, -2, 2, 0, -2])
    # ‖v‖ = 5 of (3, 4): with five levels both are on one, whatever is drawn.
    five = quantize.Quantize(levels=5)
    exact = quantize.compress({"w": jnp.array([3.0, -4.0])}, KEY, five)
    np.testing.assert_allclose(exact["w"], [3.0, -4.0], rtol=1e-6)
    leaves = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([[0.06], [0.08]])}
    each = quantize.Quantize(levels=5, per="leaf")
    chex.assert_trees_all_close(quantize.compress(leaves, KEY, each), leaves, rtol=1e-6)
    most = quantize.Quantize(levels=4, norm="max")
    exact = quantize.compress({"w": jnp.array([3.0, -4.0])}, KEY, most)
    np.testing.assert_allclose(exact["w"], [3.0, -4.0], rtol=1e-6)
    zeros = quantize.compress({"w": jnp.zeros(3)}, KEY, five)
    np.testing.assert_array_equal(zeros["w"], np.zeros(3))
    # The nearest of −2, −1, 0, 1, 2 times 4/2; 0 of a leaf of zeros.
    model = {"params": {"a": jnp.array([4.0, -2.9, 0.9]), "b": jnp.zeros(2)}, "s": 7}
    rounded = quantize.download(model, quantize.ModelDownload(levels=2))
    np.testing.assert_array_equal(rounded["params"]["a"], [4, -2, 0])
    np.testing.assert_array_equal(rounded["params"]["b"], [0, 0])
    assert rounded["s"] == 7


@pytest.mark.parametrize("feedback", ["none", "ef", "ef21"])
def test_frozen_parameters_are_not_in_an_update(feedback):
    """Of 90 numbers that train 9 arrive, also from an attacker; none of the others."""
    links = attack.ATTACK, sparse.TOPK
    lies = attackers.AttackConfig(kind="gaussian", share=0.5, strength=1.0)
    topk = sparse.TopK(fraction=0.1, feedback=feedback)
    hparams = HParams(settings={"attack": components.arrays(lies), "topk": topk})
    model = {"params": {"body": jnp.zeros(520), "head": jnp.linspace(1.0, 2, 90)}}
    zeros = jax.tree.map(jnp.zeros_like, model)
    for is_attacker in (False, True):
        info = LinkInfo(KEY, 0, zeros, model, 0, jnp.bool_(is_attacker))
        states = chain.init(links, zeros, hparams)
        info = info._replace(frozen=("body",))
        sent, _ = chain.send(links, states, info, hparams)
        np.testing.assert_array_equal(sent["params"]["body"], 0)
        assert jnp.count_nonzero(sent["params"]["head"]) == 9


@pytest.mark.parametrize(
    ("compress", "settings"),
    [
        (sparse.randk, sparse.RandK(fraction=0.4)),
        (quantize.quantized, quantize.Quantize(levels=1)),
        (quantize.quantized, quantize.Quantize(levels=3, norm="max")),
    ],
)
def test_the_mean_is_the_update(compress, settings):
    keys = jax.random.split(KEY, 20_000)
    drawn = np.asarray(jax.vmap(lambda key: compress(V, key, settings))(keys))
    error = drawn.std(axis=0) / np.sqrt(len(keys))
    assert (np.abs(drawn.mean(axis=0) - V) <= 5 * error + 1e-6).all()
    if compress is sparse.randk:
        assert ((drawn != 0).sum(axis=1) <= 2).all()
    elif compress is quantize.quantized:
        norm = np.linalg.norm(V) if settings.norm == "l2" else 3
        levels = settings.levels * np.abs(drawn) / norm
        np.testing.assert_allclose(levels, levels.round(), atol=1e-5)


COMPRESSORS = [n for n, link in UPLINKS.items() if hasattr(link.section, "feedback")]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_what_is_not_sent_is_kept(name):
    """Σ u = Σ sent + e of ten updates, without a leaf that stays with the client."""
    link, rng = UPLINKS[name], np.random.default_rng(0)
    settings = link.section(feedback="ef")
    shapes = {"a": jnp.zeros((3, 4)), "local": jnp.zeros(2)}
    kept, total, sent = link.init({"params": shapes}, settings), 0.0, 0.0
    for t in range(10):
        update = {"a": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32), "local": None}
        info = LinkInfo(jax.random.fold_in(KEY, t), jnp.int32(t), {}, {})
        message, kept = link.send({"params": update}, kept, info, settings)
        assert message["params"]["local"] is None
        total, sent = total + update["a"], sent + message["params"]["a"]
    np.testing.assert_allclose(total, sent + kept["a"], atol=1e-5)
    assert np.abs(kept["a"]).max() > 0.01
    np.testing.assert_array_equal(kept["local"], np.zeros(2))


@pytest.mark.parametrize("name", UPLINKS)
def test_every_link(name):
    """Zeros and leaves that stay with a client; the state keeps its structure."""
    link, info = UPLINKS[name], LinkInfo(KEY, jnp.int32(0), {}, {})
    settings, zeros = components.arrays(link.section()), jnp.zeros((3, 4))
    update = {"params": {"a": zeros, "local": None}}
    state = link.init({"params": {"a": zeros, "local": V}}, settings)
    sent = jax.jit(lambda update: link.send(update, state, info, settings))(update)
    chex.assert_trees_all_equal_shapes_and_dtypes(sent, (update, state))
    assert np.isfinite(sent[0]["params"]["a"]).all()
    traffic = link.bits(Traffic({}, np.full(2, 384.0), np.full(2, 12.0)), settings)
    assert (traffic.upload > 0).all()


class TwoLeaves(nn.Module):
    """d = 100: ten and ninety, the ten alone in the first."""

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, 10)
        return scale[None] * nn.Dense(10, use_bias=False, name="dense")(x)


# ⌈log₂ 100⌉ = 7, ⌈log₂ 90⌉ = 7.
@pytest.mark.parametrize(
    ("links", "local", "upload", "download"),
    [
        ("topk", "", 10 * (32 + 7), 3200),
        ("topk", "scale", 9 * (32 + 7), 2880),
        ("randk", "", 10 * 32 + 64, 3200),
        ("quantize", "", 100 * (1 + 3) + 2 * 32, 3200),
        ("quantize", "scale", 90 * (1 + 3) + 32, 2880),
        ("sign", "", 100 + 32, 3200),
        ("topk,sign", "", 10 * (1 + 7) + 32, 3200),
        ("randk,quantize", "", 10 * (1 + 3) + 64 + 2 * 32, 3200),
        ("model_download", "scale", 2880, 90 * (1 + 2) + 32),
    ],
)
def test_bits_by_hand(links, local, upload, download):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 9)).astype(np.float32), rng.integers(0, 10, 40)
    values = {"uplink.chain": links, "model.local": local, "num_intervals": 2}
    values |= {"quantize.levels": 4} if "quantize" in links else {}
    values |= {"quantize.per": "leaf"} if "quantize" in links else {}
    values |= {"model_download.levels": 3} if "download" in links else {}
    values |= {"evaluation.clients": "labels"} if local else {}
    values |= {"num_clients": 2, "batch_size": 4, "schedule.data_size": 8}
    prepared = prepare(
        replace(tsfl_jax.Config(), values),
        model=TwoLeaves(),
        dataset=tsfl_jax.make_dataset(x, y, x, y, num_classes=10),
    )
    sizes = prepared.network.params, prepared.hparams, 2
    sent = chain.traffic(prepared.uplinks, *sizes)
    np.testing.assert_array_equal(sent.upload, [upload] * 2)
    np.testing.assert_array_equal(sent.download, [download] * 2)


# A linear regression with full batches: what a client does is plain gradient descent.
N, SIZE, D, LR = 4, 12, 6, 0.1
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N * SIZE + 8, D)).astype(np.float32)
Y = (X @ RNG.normal(size=D) + RNG.normal(size=len(X)))[:, None].astype(np.float32)
ROWS = np.arange(N * SIZE).reshape(N, SIZE)
MODEL = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros)
CUSTOM = {
    "model": MODEL,
    "dataset": tsfl_jax.make_dataset(X[: N * SIZE], Y[: N * SIZE], X, Y),
    "partition": [list(rows) for rows in ROWS],
}


def config_of(**settings):
    values = {"num_intervals": 10, "num_clients": N, "lr": LR, "momentum": 0.0}
    values |= {"batch_size": SIZE, "uplink.chain": "topk", "topk.fraction": 0.3}
    values |= {"devices": 1}
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    return replace(tsfl_jax.Config(), values)


TAU = (1, 3, 2, 1)
EXPLICIT = {"schedule__kind": "explicit", "schedule__tau": TAU}
SPEEDS = {"timeline__speed": "constant(0.1);constant(0.13);constant(0.04);constant(1)"}
SETTINGS = {
    "fedavg": EXPLICIT | {"algorithm": "fedavg"},
    "scaffold": EXPLICIT | {"algorithm": "scaffold"},
    # Updates of a cohort of two; what the others keep waits for them.
    "cohort": {"algorithm": "fedavg", "cohort__size": 2}
    | {"schedule__kind": "distribution", "schedule__tau_groups": "uniform(1,4)"},
    # A client may be in a buffer twice; the second time it has its newer e.
    "fedbuff": {"algorithm": "fedbuff", "timeline__framework": "fedbuff"}
    | SPEEDS
    | {"timeline__buffer": 3},
    # Models are mixed: what a client sends is measured against its own download.
    "afl": {"algorithm": "fedasync", "timeline__framework": "afl"}
    | SPEEDS
    | {"fedasync__gamma": 0.4},
}


def numpy_topk(v):
    kept = np.argsort(-np.abs(v), kind="stable")[: int(np.ceil(0.3 * v.size))]
    return np.where(np.isin(np.arange(v.size), kept), v, 0)


def numpy_sign(v):
    return np.sign(v) * np.abs(v).sum() / max(np.count_nonzero(v), 1)


def replay(kind, times, weights, compress, feedback):
    """The models w^0, w^1, … of a schedule, in float64."""
    versions, c, c_i = [np.zeros(D)], np.zeros(D), np.zeros((N, D))
    kept = np.zeros((N, D))
    for t, rho in enumerate(weights):
        w, total, server = versions[-1], np.zeros(D), c.copy()
        for k in np.argsort(times.delivery.task[t], kind="stable"):
            i, tau = times.client[t, k], times.tau[t, k]
            if tau == 0:
                continue
            base = versions[t - times.delivery.lag[t, k]]
            x, y, v = X[ROWS[i]].astype(float), Y[ROWS[i], 0].astype(float), base
            correction = server - c_i[i] if kind == "scaffold" else 0
            for _ in range(tau):  # the loss is the mean squared error
                v = v - LR * (2 * x.T @ (x @ v - y) / SIZE + correction)
            u = v - base
            if feedback == "ef21":
                kept[i] += compress(u - kept[i])
                message = kept[i].copy()
            else:
                before = kept[i] if feedback == "ef" else 0
                message = compress(before + u)
                kept[i] = before + u - message
            if kind == "scaffold":
                c_i[i] = c_i[i] - server - message / (LR * tau)
            if kind == "afl":
                message = 0.6 * (base + message - w)
            total += rho[k] * message
        c = c_i.mean(axis=0)
        versions.append(w + total)
    return versions


FAST = [("fedavg", "sign", "ef"), ("afl", "topk", "ef"), ("scaffold", "topk", "none")]
SLOW = itertools.product(SETTINGS, ["topk", "sign"], ["none", "ef", "ef21"])


@pytest.mark.parametrize(
    ("kind", "link", "feedback"),
    FAST + [pytest.param(*c, marks=pytest.mark.slow) for c in SLOW if c not in FAST],
)
def test_updates_are_those_of_numpy(kind, link, feedback):
    changes = SETTINGS[kind] | {f"{link}__feedback": feedback, "uplink__chain": link}
    if link == "sign":
        changes["topk__fraction"] = 0.1  # the default: nothing reads it
    config = config_of(**changes)
    result = tsfl_jax.simulate(config, **CUSTOM)
    times = prepare(config, **CUSTOM).workload.schedule
    assert len(times.tau) >= 5 and (kind not in ("fedbuff", "afl") or times.snapshots)
    compress = {"topk": numpy_topk, "sign": numpy_sign}[link]
    versions = replay(kind, times, result.history["rho"], compress, feedback)
    kernel = result.params["params"]["kernel"][:, 0]
    np.testing.assert_allclose(kernel, versions[-1], rtol=1e-3, atol=1e-4)
    assert np.abs(versions[-1] - versions[-2]).max() > 1e-3  # still at work


@pytest.mark.slow
def test_all_entries_are_all():
    plain = tsfl_jax.simulate(config_of(uplink__chain="", topk__fraction=0.1), **CUSTOM)
    whole = tsfl_jax.simulate(config_of(topk__fraction=1.0), **CUSTOM)
    chex.assert_trees_all_close(plain.params, whole.params, rtol=1e-5)


def test_a_rounded_download_is_what_clients_change():
    """FedAvg with one step each: w minus the step at Q(w)."""
    changes = {"algorithm": "fedavg", "schedule__kind": "explicit"}
    changes |= {"schedule__tau": (1,) * N, "num_intervals": 2, "topk__fraction": 0.1}
    changes |= {"uplink__chain": "model_download", "model_download__levels": 3}
    w = np.zeros(D)
    x, y = X[: N * SIZE].astype(float), Y[: N * SIZE, 0].astype(float)
    for _ in range(2):
        step = np.abs(w).max() / 3 or 1.0
        start = step * np.round(w / step)
        w = w - LR * 2 * x.T @ (x @ start - y) / len(x)
    result = tsfl_jax.simulate(config_of(**changes), **CUSTOM)
    kernel = result.params["params"]["kernel"][:, 0]
    np.testing.assert_allclose(kernel, w, rtol=1e-5, atol=1e-6)


def test_layers_that_are_sent_at_times_are_not_compressed():
    changes = {"model__local": "kernel", "model__local_period": 2}
    with pytest.raises(UserError, match="local_period=0"):
        prepare(config_of(**changes))
