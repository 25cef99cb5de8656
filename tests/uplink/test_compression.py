"""Compressed updates: by hand, in the mean, and ten intervals against NumPy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tsfl_jax.config import replace
from tsfl_jax.uplink import UPLINKS, quantize, randk, sign, topk

V = jnp.array([3.0, -1.0, 2.0, 0.0, -2.0])
KEY = jax.random.key(0)


def test_by_hand():
    largest = topk.compress(V, KEY, topk.TopK(fraction=0.5))  # k = ⌈2.5⌉
    np.testing.assert_array_equal(largest, [3, 0, 2, 0, -2])
    # Of equal entries the first, and never none.
    np.testing.assert_array_equal(
        topk.compress(V, KEY, topk.TopK(fraction=0.4)), [3, 0, 2, 0, 0]
    )
    np.testing.assert_array_equal(
        topk.compress(V, KEY, topk.TopK(fraction=0.01)), [3, 0, 0, 0, 0]
    )
    scaled = sign.compress(V, KEY, sign.Sign())  # ‖v‖₁/d = 8/5
    np.testing.assert_allclose(scaled, [1.6, -1.6, 1.6, 1.6, -1.6])
    # ‖v‖ = 5 of (3, 4): with five levels both are on one, whatever is drawn.
    exact = quantize.compress(jnp.array([3.0, -4.0]), KEY, quantize.Quantize(levels=5))
    np.testing.assert_allclose(exact, [3.0, -4.0], rtol=1e-6)
    zeros = quantize.compress(jnp.zeros(3), KEY, quantize.Quantize())
    np.testing.assert_array_equal(zeros, np.zeros(3))


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (randk, randk.RandK(fraction=0.4)),
        (quantize, quantize.Quantize(levels=1)),
        (quantize, quantize.Quantize(levels=3)),
    ],
)
def test_the_mean_is_the_update(module, settings):
    keys = jax.random.split(KEY, 20_000)
    drawn = np.asarray(jax.vmap(lambda key: module.compress(V, key, settings))(keys))
    error = drawn.std(axis=0) / np.sqrt(len(keys))
    assert (np.abs(drawn.mean(axis=0) - V) <= 5 * error + 1e-6).all()
    if module is randk:
        assert ((drawn != 0).sum(axis=1) <= 2).all()
    else:
        levels = settings.levels * np.abs(drawn) / np.linalg.norm(V)
        np.testing.assert_allclose(levels, levels.round(), atol=1e-5)


def test_bits_by_hand():
    sizes = [10, 90]  # d = 100, ⌈log₂ d⌉ = 7
    assert topk.bits(sizes, topk.TopK(fraction=0.1)) == 10 * (32 + 7)
    assert randk.bits(sizes, randk.RandK(fraction=0.1)) == 10 * 32 + 64
    assert quantize.bits(sizes, quantize.Quantize(levels=4)) == 100 * (1 + 3) + 32
    assert sign.bits(sizes, sign.Sign()) == 100 + 32


# A linear regression with full batches: what a client does is plain gradient descent.
NUM, SIZE, LR, T = 4, 12, 0.1, 10
RNG = np.random.default_rng(0)
X = RNG.normal(size=(NUM * SIZE + 8, 6)).astype(np.float32)
Y = (X @ RNG.normal(size=6) + RNG.normal(size=len(X)))[:, None].astype(np.float32)
TAU = (1, 3, 2, 1)
PARTS = np.arange(NUM * SIZE).reshape(NUM, SIZE)


def run(link, **settings):
    config = {"algorithm": "fedavg", "num_intervals": T, "num_clients": NUM, "lr": LR}
    config |= {"batch_size": SIZE, "momentum": 0.0}
    config |= {"schedule.kind": "explicit", "schedule.tau": TAU, "uplink.chain": link}
    config |= {name.replace("__", "."): value for name, value in settings.items()}
    return tsfl_jax.simulate(
        replace(tsfl_jax.Config(), config),
        model=nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros),
        dataset=tsfl_jax.make_dataset(X[: NUM * SIZE], Y[: NUM * SIZE], X, Y),
        partition=[list(rows) for rows in PARTS],
    )


def numpy_topk(v, fraction):
    kept = np.argsort(-np.abs(v), kind="stable")[
        : max(1, int(np.ceil(fraction * v.size)))
    ]
    return np.where(np.isin(np.arange(v.size), kept), v, 0)


def numpy_sign(v, _):
    return np.where(v < 0, -1, 1) * np.abs(v).mean()


@pytest.mark.parametrize("feedback", ["none", "ef", "ef21"])
@pytest.mark.parametrize("link", ["topk", "sign"])
def test_ten_intervals_are_those_of_numpy(link, feedback):
    compress = {"topk": numpy_topk, "sign": numpy_sign}[link]
    fraction = {"topk__fraction": 0.3} if link == "topk" else {}
    got = run(link, **{f"{link}__feedback": feedback}, **fraction)
    w, kept = np.zeros(6), np.zeros((NUM, 6))
    left, sent = np.zeros((NUM, 6)), np.zeros((NUM, 6))
    for _ in range(T):
        total = np.zeros(6)
        for i, tau in enumerate(TAU):
            x, y, mine = (
                X[PARTS[i]].astype(float),
                Y[PARTS[i], 0].astype(float),
                w.copy(),
            )
            for _ in range(tau):  # the loss is the mean squared error
                mine -= 2 * LR * x.T @ (x @ mine - y) / SIZE
            u = mine - w
            if feedback == "ef21":
                kept[i] += compress(u - kept[i], 0.3)
                message = kept[i].copy()
            else:
                before = kept[i] if feedback == "ef" else 0
                message = compress(before + u, 0.3)
                kept[i] = before + u - message
            left[i], sent[i] = left[i] + u, sent[i] + message
            total += message / NUM
        w = w + total
    if feedback == "ef":  # the sum telescopes: what is not sent is kept
        np.testing.assert_allclose(left - sent, kept, atol=1e-12)
    kernel = got.params["params"]["kernel"][:, 0]
    np.testing.assert_allclose(kernel, w, rtol=1e-4, atol=1e-5)


def test_every_compressor_has_its_bytes_and_one_result(tmp_path):
    """In a sweep, resumed, and with all entries: nothing is left out."""
    plain = run("")
    whole = run("topk", topk__fraction=1.0)
    for a, b in zip(*map(jax.tree.leaves, (plain.params, whole.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert {"topk", "randk", "quantize", "sign"} <= UPLINKS.keys()
    deliveries = NUM * T
    for link, bits in (
        ("topk", 32 + 3),  # k = 1 of d = 6
        ("randk", 32 + 64),
        ("quantize", 6 * (1 + 5) + 32),
        ("sign", 6 + 32),
    ):
        down = 6 * 32
        assert run(link).summary["bytes_moved"] == deliveries * (down + bits) / 8, link
