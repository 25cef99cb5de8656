"""What a rule would ignore is refused in one line; defaults that are as good."""

import dataclasses

import numpy as np
import pytest

import tsfl_jax
from tests.experiment.test_runner import small
from tsfl_jax import config
from tsfl_jax.experiment import prepare, rule_settings
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.base import Aggregator, Settings
from tsfl_jax.types import UserError

# Written down once more: what the functions in `rules` read of the server's settings.
READ = {
    "fedbuff": {"lr"},
    "scaffold": {"lr"},
    "fedavgm": {"lr", "momentum"},
    "fedadam": {"lr", "momentum", "second", "floor"},
    "fedyogi": {"lr", "momentum", "second", "floor"},
    "median": {"lr"},
    "trimmed_mean": {"lr", "trim"},
    "geometric_median": {"lr"},
    "krum": {"lr", "trim"},
    "multi_krum": {"lr", "trim"},
}
OTHER = {"lr": 0.5, "momentum": 0.5, "second": 0.5, "floor": 0.5, "trim": 0.2}


def with_server(algorithm, framework="none", **server) -> config.Config:
    found = config.Config(algorithm=algorithm)
    found.timeline.framework = framework
    found.server = dataclasses.replace(found.server, **server)
    return found


@pytest.mark.parametrize("name", AGGREGATORS)
def test_server_settings_that_a_rule_does_not_read_are_refused(name):
    for setting, value in OTHER.items():
        given = with_server(name, **{setting: value})
        if setting in READ.get(name, ()):
            rule_settings.check(given)
            continue
        with pytest.raises(UserError) as error:
            rule_settings.check(given)
        message = str(error.value)
        assert f"--config.server.{setting}={value}: would be ignored" in message
        assert f"--config.algorithm={name}; it belongs to" in message
        assert "\n" not in message


ABSOLUTE = {"fedasync", "fedbuff"}
RELATIVE = {"fedavg", "fedprox", "fedat", "scaffold", "fedavgm", "fedadam", "fedyogi"}
STALE = {"afl", "fedbuff", "fedat", "safa"}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_staleness_is_refused_where_it_does_nothing(name):
    for framework in config.FRAMEWORKS:
        given = with_server(name, framework, staleness="polynomial")
        works = framework in STALE if name in ABSOLUTE else False
        # In AFL and in a tier of FedAT all models of an update are as stale.
        works |= name in RELATIVE and framework in ("fedbuff", "safa")
        if works:
            rule_settings.check(given)
            continue
        with pytest.raises(UserError, match="server.staleness=polynomial: would be ig"):
            rule_settings.check(given)


@pytest.mark.parametrize(
    ("timeline", "name"),
    [
        ({"framework": "safa", "fraction": 0.05}, "fedavg"),  # of 20 clients
        ({"framework": "fedbuff", "buffer": 1}, "fedavg"),
    ],
)
def test_staleness_is_refused_where_settings_leave_it_nothing_to_do(timeline, name):
    given = with_server(name, staleness="hinge")
    given.timeline = config.TimelineConfig(**timeline)
    with pytest.raises(UserError, match="would be ignored"):
        rule_settings.check(given)


def test_models_are_stale_without_any_lag_that_is_tolerated():
    # What arrives as a round ends counts in the next one, see test_timeline.
    given = with_server("fedasync", staleness="hinge")
    given.timeline = config.TimelineConfig(framework="safa", lag=0)
    rule_settings.check(given)


def test_a_rule_that_is_declared_to_read_what_is_no_setting(monkeypatch):
    slip = AGGREGATORS["fedavg"]._replace(settings=Settings(("momentun",)))
    monkeypatch.setitem(AGGREGATORS, "slip", slip)
    with pytest.raises(KeyError, match="'slip' .* 'server.momentun', which is no"):
        rule_settings.check(with_server("fedavg"))


@pytest.mark.parametrize(
    ("kind", "letter"),
    [("constant", "a"), ("constant", "b"), ("polynomial", "b"), ("exponential", "a")],
)
def test_parameters_of_another_staleness_are_refused(kind, letter):
    changes = {f"staleness_{letter}": 2.0}
    given = with_server("fedasync", "afl", staleness=kind, **changes)
    with pytest.raises(UserError, match=f"staleness_{letter}=2.0: would be ignored"):
        rule_settings.check(given)


def buffered(**server) -> config.Config:
    given = small(algorithm="fedbuff", num_clients=4)
    given.timeline.framework, given.timeline.buffer = "fedbuff", 2
    given.server = dataclasses.replace(given.server, **server)
    return given


def test_a_staleness_that_changes_nothing_in_this_run_is_noted():
    settings = buffered(staleness="hinge", staleness_b=1000.0)
    assert any("changes no weight" in n for n in prepare.prepare(settings).notes)
    settings = buffered(staleness="hinge", staleness_b=0.0)
    assert not any("no weight" in n for n in prepare.prepare(settings).notes)


def test_a_rule_of_the_users_own_may_read_any_setting():
    own = AGGREGATORS["fedavg"]._replace(update=lambda m, w, s, e, h: (m, s))
    assert isinstance(own, Aggregator)
    settings = small(algorithm="fedavg")
    settings.server.lr = 0.5
    with pytest.raises(UserError, match="server.lr=0.5"):
        prepare.prepare(settings)
    assert prepare.prepare(settings, aggregator=own).hparams.server_lr == 0.5


def test_clipping_and_a_proximal_term_under_fednova_are_refused():
    settings = small(algorithm="fednova", proximal=True, clip_norm=1.0)
    with pytest.raises(UserError, match="clip_norm=1.0.*leave out one"):
        prepare.prepare(settings)


@pytest.mark.parametrize("name", ["krum", "multi_krum"])
def test_krum_needs_more_than_twice_the_clients_that_may_be_wrong(name):
    def settings(clients, trim):
        found = small(algorithm=name, num_clients=clients)
        found.schedule.kind, found.schedule.tau = "explicit", (1,)
        found.server.trim = trim
        return found

    with pytest.raises(UserError, match="2f \\+ 2 < n, but of n = 4 .* f = 1"):
        prepare.prepare(settings(4, 0.3))
    with pytest.raises(UserError, match="n = 2 .* f = 0"):
        prepare.prepare(settings(2, 0.0))
    enough = prepare.prepare(settings(4, 0.2)).notes
    assert not any("2f + 2 < n" in note for note in enough)
    fewer = settings(4, 0.2)
    fewer.num_intervals, fewer.schedule.dropout = 40, 0.5
    assert any("2f + 2 < n" in note for note in prepare.prepare(fewer).notes)


def test_krum_counts_what_the_server_sees():
    """f = ⌊0.4 n⌋: n = 10 is too few (4), n = 9 and 7 are not (3 and 2), 8 is (3)."""
    notes = AGGREGATORS["krum"].settings.notes
    [note] = notes("krum", 0.4, np.array([10, 9, 8, 7, 0]))
    assert "in 2 of 4 updates, of 8 to 10 clients" in note
    assert notes("krum", 0.4, np.array([9, 7])) == ()
    with pytest.raises(UserError, match="of n = 10 clients .* f = 4"):
        notes("krum", 0.4, np.array([8, 10]))
    # A client that does nothing and says that it did is one of them.
    echo = small(algorithm="krum", num_clients=7)
    echo.schedule.kind, echo.schedule.tau = "explicit", (2,)
    echo.schedule.free_riders, echo.schedule.free_riding = 3, "echo"
    echo.server.trim = 0.3
    assert not any("2f + 2" in note for note in prepare.prepare(echo).notes)


@pytest.mark.parametrize(
    ("algorithm", "by_size"), [("dms", "yes"), ("dms_adaptive", "auto")]
)
def test_weights_by_size_have_no_limit_and_are_projected(algorithm, by_size):
    given = with_server(algorithm, by_size=by_size)
    given.dms.weight_limit = 2.0
    with pytest.raises(UserError, match="weight_limit=2.0: .*above θ/N.*by_size=no"):
        rule_settings.check(given)
    given.dms.weight_limit, given.dms.project = 0.0, False
    with pytest.raises(UserError, match="project=False: .*by_size=no"):
        rule_settings.check(given)
    given.server.by_size = "no"
    rule_settings.check(given)


@pytest.mark.slow
def test_fedavgm_is_by_default_as_good_as_fedavg():
    def final(algorithm, **server):
        settings = config.Config(num_intervals=50, lr=0.1, algorithm=algorithm)
        settings.checkpoint, settings.devices = False, 1
        settings.eval_every = settings.report_every = 50
        settings.data.name, settings.schedule.kind = "digits", "case1"
        settings.schedule.data_size, settings.partition.replacement = 64, True
        settings.server = dataclasses.replace(settings.server, **server)
        result = tsfl_jax.simulate(settings)
        return result.history["test_loss"][-1]

    plain = final("fedavg")
    assert final("fedavgm") < 1.05 * plain
    assert final("fedavgm", lr=1.0) > 1.3 * plain  # the textbook's step


@pytest.mark.parametrize(("beta", "step"), [(0.0, 1.0), (0.5, 1.0), (0.95, 0.1)])
def test_fedavgms_default_step_follows_its_momentum(beta, step):
    given = with_server("fedavgm", momentum=beta)
    found = prepare.hparams_of(given, AGGREGATORS["fedavgm"])
    np.testing.assert_allclose(found.server_lr, step, rtol=1e-6)
