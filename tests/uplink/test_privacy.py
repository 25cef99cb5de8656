"""Clipping and noise: by hand, by Monte Carlo, and ε against the library itself."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tsfl_jax
from tests.uplink import test_compression as regression
from tsfl_jax import rng
from tsfl_jax.config import replace
from tsfl_jax.prepare.prepare import prepare
from tsfl_jax.report import page
from tsfl_jax.types import HParams, UserError
from tsfl_jax.uplink import chain, clip, noise
from tsfl_jax.uplink.link import LinkInfo, SumInfo

KEY = jax.random.key(0)
INFO = LinkInfo(KEY, 0, None, None)


def config_of(**settings):
    """Four clients of unequal data on digits, and a small network."""
    values = {"algorithm": "fedavg", "num_intervals": 6, "num_clients": 4, "lr": 0.1}
    values |= {"batch_size": 8, "schedule.data_size": 32, "model.hidden": 4}
    values |= {"schedule.kind": "explicit", "schedule.tau": (1, 2, 1, 1)}
    values |= {"schedule.size_groups": "constant(8);constant(16)"}
    values |= {"uplink.chain": "clip,noise", "clip.norm": 0.5, "devices": 1}
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    if "clip" not in values["uplink.chain"]:
        del values["clip.norm"]
    return replace(tsfl_jax.Config(), values)


COHORT = {"num_clients": 60, "cohort__size": 12, "schedule__size_groups": ""}
COHORT |= {"partition__replacement": True}
COHORT |= {"schedule__tau": (1,), "partition__kind": "iid"}


def test_clipping_by_hand():
    update = {"params": {"a": jnp.array([3.0]), "b": jnp.array([0.0, 4.0])}, "s": 7}
    for norm, factor in ((10.0, 1.0), (5.0, 1.0), (2.5, 0.5)):  # ‖u‖ = 5
        sent, state = clip.send(update, (), INFO, clip.Clip(norm=norm))
        np.testing.assert_array_equal(sent["params"]["a"], [3 * factor])
        np.testing.assert_array_equal(sent["params"]["b"], [0, 4 * factor])
        assert state == () and sent["s"] == 7
    for wrong in (math.nan, math.inf):
        lost, _ = clip.send({"params": jnp.array([wrong, 1])}, (), INFO, clip.Clip())
        np.testing.assert_array_equal(lost["params"], [0, 0])


def test_an_adaptive_norm_follows_its_quantile_by_hand():
    settings = clip.Clip(norm=2.0, quantile=0.5, rate=0.2)
    state = clip.init({}, settings)
    _, below = clip.send({"params": jnp.array([2.0])}, state, INFO, settings)
    _, above = clip.send({"params": jnp.array([2.1])}, state, INFO, settings)
    assert (state.is_below, below.is_below, above.is_below) == (-1, 1, 0)
    # Three of four deliver, two are below: b̃ = ⅔.
    states = jax.tree.map(lambda *a: jnp.stack(a), below, state, above, below)
    info = SumInfo(KEY, jnp.float32(1), jnp.int32(3))
    new = clip.adapt(states, info, settings)
    np.testing.assert_allclose(new.factor, math.exp(-0.2 * (2 / 3 - 0.5)), rtol=1e-6)
    assert (new.is_below == -1).all()
    idle = clip.adapt(states, info._replace(count=jnp.int32(0)), settings)
    np.testing.assert_array_equal(idle.factor, 1)
    # With noise b̃ has a standard deviation of σ_b/m = 5 z/m.
    noisy = jax.vmap(
        lambda key: clip.adapt(states, info._replace(key=key, multiplier=0.3), settings)
    )
    share = 0.5 - np.log(noisy(jax.random.split(KEY, 4000)).factor[:, 0]) / 0.2
    assert np.std(share) == pytest.approx(5 * 0.3 / 3, rel=0.05)


def test_noise_has_the_standard_deviation_of_its_sensitivity():
    """z C max_i Σ_k |ρ_k|: two deliveries of client 1 count together."""
    links = (clip.CLIP, noise.NOISE)
    sums = {"params": jnp.full((20_000,), 3.0)}
    info = SumInfo(rng.key(1), jnp.float32(0.2 + 0.3), jnp.int32(2))
    for quantile, share in ((0.0, 1.0), (0.5, 0.99)):
        limit = clip.Clip(norm=2.0, quantile=quantile)
        settings = {"clip": limit, "noise": noise.Noise(multiplier=1.5)}
        hparams = HParams(settings=settings)
        states = jax.tree.map(lambda s: s[None], chain.init(links, {}, hparams))
        drawn = chain.receive(links, sums, states, info, hparams)["params"] - 3
        assert abs(drawn.mean()) < 0.05
        assert drawn.std() == pytest.approx(1.5 * 2 * 0.5 / share**0.5, rel=0.02)
    frozen = info._replace(frozen=("params/body",))
    parts = {"params": {"body": sums["params"], "head": sums["params"]}}
    parts = chain.receive(links, parts, states, frozen, hparams)["params"]
    np.testing.assert_array_equal(parts["body"], 3)
    assert parts["head"].std() > 1
    settings |= {"noise": noise.Noise(multiplier=1.5, where="client")}
    hparams = HParams(
        settings={"clip": clip.Clip(norm=2.0), "noise": settings["noise"]}
    )
    same = chain.receive(links, sums, ((), ()), info, hparams)
    np.testing.assert_array_equal(same["params"], sums["params"])
    zeros = {"params": jnp.zeros(20_000)}
    task = LinkInfo(KEY, 0, zeros, {"params": jnp.full((20_000,), 1.0)})
    sent, _ = chain.send(links, ((), ()), task, hparams)
    assert sent["params"].std() == pytest.approx(1.5 * 2, rel=0.02)


@pytest.mark.slow
def test_without_noise_the_bits_are_those_of_before():
    plain = tsfl_jax.simulate(config_of(uplink__chain=""))
    off = {"noise__multiplier": 0.0, "clip__norm": 100.0}
    pytest.importorskip("dp_accounting")
    silent = tsfl_jax.simulate(config_of(**off))
    jax.tree.map(np.testing.assert_array_equal, plain.params, silent.params)
    assert silent.summary["epsilon"] == math.inf


@pytest.mark.parametrize("quantile", [pytest.param(0.0, marks=pytest.mark.slow), 0.6])
def test_ten_intervals_are_those_of_numpy(quantile):
    got = tsfl_jax.simulate(
        regression.config_of(
            **regression.SETTINGS["fedavg"],
            uplink__chain="clip",
            topk__fraction=0.1,  # the default: nothing reads it
            clip__norm=0.4,
            clip__quantile=quantile,
        ),
        **regression.CUSTOM,
    )
    w, limit = np.zeros(6), 0.4
    for _ in range(10):
        total, below = np.zeros(6), 0
        for rows, tau in zip(regression.ROWS, regression.TAU, strict=True):
            x, y, local = regression.X[rows], regression.Y[rows, 0], w.copy()
            for _ in range(tau):
                slope = 2 * x.T.astype(float) @ (x @ local - y) / len(rows)
                local -= regression.LR * slope
            norm = np.linalg.norm(local - w)
            below += norm <= limit
            total += (local - w) * min(1, limit / norm) / regression.N
        w += total
        if quantile:
            limit *= math.exp(-0.2 * (below / regression.N - quantile))
    kernel = got.params["params"]["kernel"][:, 0]
    np.testing.assert_allclose(kernel, w, rtol=1e-4, atol=1e-5)


def on_regression(x, **settings):
    """The regression on other inputs."""
    y = regression.Y[: len(x)]
    values = {"algorithm": "fedavg", "num_clients": 4, "batch_size": 12, "lr": 0.1}
    values |= {"schedule.kind": "explicit", "schedule.tau": regression.TAU}
    values |= {"num_intervals": 1, "uplink.chain": "clip,noise", "clip.norm": 9.0}
    values |= {"devices": 1}
    return tsfl_jax.simulate(
        replace(tsfl_jax.Config(), values | settings),
        model=nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros),
        dataset=tsfl_jax.make_dataset(x, y, regression.X, regression.Y),
        partition=[list(rows) for rows in regression.ROWS],
    )


def test_a_lost_model_counts_as_zero():
    """The others' weights do not grow, which would tell that it is lost."""
    pytest.importorskip("dp_accounting")
    models = {}
    for name, factor in (("zero", 0.0), ("lost", 1e36)):
        x = regression.X[:48].copy()
        x[regression.ROWS[2]] *= factor
        got = on_regression(x, **{"noise.multiplier": 0.0})
        models[name] = got.params["params"]["kernel"]
        assert got.history["num_discarded"][0] == (name == "lost")
    np.testing.assert_allclose(models["lost"], models["zero"], rtol=1e-6)
    assert np.abs(models["lost"]).max() > 1e-2


def exact(dp, multipliers, delta=1e-5):
    """ε of Gaussians, by the library's privacy loss distributions."""
    events = [dp.GaussianDpEvent(float(z)) for z in multipliers]
    special = dp.NeighboringRelation.REPLACE_SPECIAL
    accountant = dp.pld.PLDAccountant(special, value_discretization_interval=1e-3)
    return accountant.compose(dp.ComposedDpEvent(events)).get_epsilon(delta)


def test_epsilon_of_unequal_weights_is_that_of_the_library():
    dp = pytest.importorskip("dp_accounting")
    accounted = prepare(config_of(noise__multiplier=4.0)).privacy
    rho = np.array([8, 16, 8, 16]) / 48
    each = [exact(dp, [4.0 * rho.max() / r] * 6) for r in rho]
    assert max(each) == each[1] > each[0]
    assert accounted.epsilon[-1] == pytest.approx(max(each), rel=5e-3)
    np.testing.assert_allclose(
        accounted.epsilon, [exact(dp, [4.0] * t) for t in range(1, 7)], rtol=5e-3
    )
    # One of two clients a time, and 1/100 of each is for the count of an adaptive norm.
    trace = {"schedule__tau": (), "schedule__kind": "case3", "noise__multiplier": 4.0}
    trace |= {"timeline__framework": "fedbuff", "timeline__buffer": 3}
    trace |= {"timeline__speed": "constant(1);constant(0.3)", "num_intervals": 5}
    config = config_of(algorithm="fedbuff", schedule__interval_seconds=9.0, **trace)
    for quantile in (0.0, 0.5):
        prepared = prepare(replace(config, {"clip.quantile": quantile}))
        clients, share = prepared.workload.trace.client, 0.01 * (quantile > 0)
        assert max(np.bincount(row).max() for row in clients) > 1  # twice in a buffer
        units = np.zeros(4)
        for row in clients:
            times = np.bincount(row, minlength=4)
            parts = (times / times.max()) ** 2
            units += (1 - share) * parts + share * (times > 0)
        expected = exact(dp, [4 * units.max() ** -0.5])
        assert prepared.privacy.epsilon[-1] == pytest.approx(expected, rel=5e-3)
    local = prepare(replace(config, {"noise.where": "client"})).privacy
    most = np.bincount(clients.ravel()).max()
    assert local.epsilon[-1] == pytest.approx(exact(dp, [4.0] * most), rel=5e-3)


@pytest.mark.parametrize(
    ("sampler", "weighting"),
    [
        pytest.param("uniform", "mean", marks=pytest.mark.slow),
        ("poisson", "inverse"),
        ("poisson", "ratio"),
    ],
)
def test_epsilon_of_sampled_cohorts_is_that_of_their_event(sampler, weighting):
    dp = pytest.importorskip("dp_accounting")
    options = {"cohort__sampler": sampler, "cohort__weighting": weighting}
    config = config_of(num_intervals=20, noise__multiplier=4.0, **COHORT, **options)
    prepared = prepare(config)
    relation, gaussian = dp.NeighboringRelation, dp.GaussianDpEvent
    event = {
        "uniform": dp.SampledWithoutReplacementDpEvent(60, 12, gaussian(2.0)),
        "poisson": dp.PoissonSampledDpEvent(0.2, gaussian(4.0)),
    }[sampler]
    near = relation.REPLACE_ONE if sampler == "uniform" else relation.REPLACE_SPECIAL
    sampled = dp.rdp.RdpAccountant(neighboring_relation=near)
    sampled = sampled.compose(event, 20).get_epsilon(1e-5)
    times = prepared.workload.schedule
    count = np.bincount(times.client[times.tau > 0])
    is_fixed = len(set((times.tau > 0).sum(axis=1))) == 1
    assert is_fixed == (sampler == "uniform")
    if weighting == "ratio":  # 1/|S| varies: no event fits
        assert prepared.privacy.method.startswith("exact")
        assert exact(dp, [4.0] * count.max()) > prepared.privacy.epsilon[-1] > sampled
        return
    expected = min(sampled, exact(dp, [4.0] * count.max()))
    assert prepared.privacy.epsilon[-1] == pytest.approx(expected, rel=5e-3)
    assert ("secret" in prepared.privacy.method) == (expected == sampled)
    if sampler == "uniform":
        return  # slower, and the same search
    target = prepare(replace(config, {"noise.epsilon": 1.0, "noise.multiplier": 1.0}))
    assert 0.995 < target.privacy.epsilon[-1] <= 1


@pytest.mark.slow
def test_a_target_is_met_by_the_z_that_the_run_has(tmp_path):
    pytest.importorskip("dp_accounting")
    config = config_of(noise__epsilon=3.0)
    swept = tsfl_jax.sweep(config, {"noise.epsilon": [3.0, 5.0]})
    targets = [prepare(replace(config, {"noise.epsilon": e})) for e in (3.0, 5.0)]
    z = [prepared.privacy.multiplier for prepared in targets]
    assert z[0] > z[1] > 0
    for run, (target, multiplier) in enumerate(zip((3.0, 5.0), z, strict=True)):
        row = swept.rows[run]
        assert target - 1e-4 < row["epsilon"] <= target and row["delta"] == 1e-5
        given = {"noise.epsilon": 0.0, "noise.multiplier": multiplier}
        folder = tmp_path / str(run)
        single = tsfl_jax.simulate(replace(config, given), workdir=folder)
        np.testing.assert_allclose(
            single.history["test_loss"], swept.history["test_loss"][run], rtol=1e-5
        )
        spent = single.history["spent_epsilon"]
        assert spent[-1] == single.summary["epsilon"] == pytest.approx(row["epsilon"])
        assert (np.diff(spent) > 0).all()
        assert '"spent_epsilon"' in (folder / "metrics.jsonl").read_text()
    assert "ε so far over interval" in page.make_page([folder])
    assert "ε = 3, δ = 1e-05" in repr(tsfl_jax.explain(config))


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(10)(x.reshape(len(x), -1))
        return nn.BatchNorm(use_running_average=not train)(x)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"uplink__chain": "noise"}, "end it in clip,noise"),
        ({"uplink__chain": "clip,topk,noise"}, "end it in clip,noise"),
        ({"uplink__chain": "clip,noise,topk"}, "end it in clip,noise"),
        ({"algorithm": "median"}, "--config.algorithm=median"),
        ({"algorithm": "scaffold"}, "--config.algorithm=scaffold"),
        ({"algorithm": "learned"}, "--config.algorithm=learned"),
        ({"algorithm": "dms"}, "--config.constants.when=once"),
        ({"clip__quantile": 0.5, "noise__where": "client"}, "clip.quantile=0.5"),
        (
            COHORT | {"cohort__sampler": "power_of_choice"},
            "--config.cohort.sampler=power_of_choice",
        ),
    ],
)
def test_what_has_no_bound_is_refused(settings, words):
    with pytest.raises(UserError, match=words):
        prepare(config_of(**settings))


def test_statistics_of_batches_must_stay_on_the_clients():
    options = {"model__hidden": tsfl_jax.Config().model.hidden}
    with pytest.raises(UserError, match="batch_stats/BatchNorm_0/mean"):
        prepare(config_of(**options), model=Normalized())
    pytest.importorskip("dp_accounting")
    kept = {"model__local": "BatchNorm", "evaluation__clients": "labels"}
    assert prepare(config_of(**options, **kept), model=Normalized()).privacy
