"""What a rule would ignore is refused in one line; defaults that are as good."""

import numpy as np
import pytest

from tests.problems import small
from tsfl_jax import config
from tsfl_jax.prepare import prepare, rule_settings
from tsfl_jax.prepare.custom_hooks import Custom
from tsfl_jax.rules import AGGREGATORS
from tsfl_jax.rules.averages import Server
from tsfl_jax.rules.robust import Krum
from tsfl_jax.rules.server_optimizers import FedAvgM
from tsfl_jax.types import UserError


def with_settings(algorithm, framework="none", **settings) -> config.Config:
    found = config.Config(algorithm=algorithm)
    found.timeline.framework = framework
    return config.replace(found, {n.replace("__", "."): v for n, v in settings.items()})


READ = {  # setting → value, a rule that reads it, and one that does not
    "dms.coupling": (0.02, "dms_adaptive", "fedavg"),
    "krum.trim": (0.2, "multi_krum", "trimmed_mean"),
}


@pytest.mark.parametrize("setting", READ)
def test_settings_of_a_component_that_was_not_chosen_are_refused(setting):
    value, reader, other = READ[setting]
    given = config.replace(config.Config(algorithm=reader), {setting: value})
    rule_settings.check_read([given], Custom())
    given.algorithm = other
    with pytest.raises(UserError) as error:
        rule_settings.check_read([given], Custom())
    message = str(error.value)
    assert f"--config.{setting}={value}: would be ignored" in message
    assert f"--config.algorithm={other}; it belongs to" in message
    assert reader in message and "\n" not in message


def test_in_a_sweep_some_run_must_read_a_setting():
    given = with_settings("dms", dms__coupling=0.02)
    other = config.replace(given, {"algorithm": "fedavg"})
    rule_settings.check_read([given, other], Custom())
    with pytest.raises(UserError, match="coupling=0.02: would be ignored .*fedavg"):
        rule_settings.check_read([other], Custom())


def test_a_rule_of_the_users_own_names_what_it_reads():
    own = AGGREGATORS["fedavg"]._replace(label="own")
    settings = small(algorithm="fedavg")
    settings.server.lr = 0.5
    with pytest.raises(UserError, match="server.lr=0.5"):
        prepare.prepare(settings, aggregator=own)
    own = own._replace(sections=(*own.sections, Server))
    found = prepare.prepare(settings, aggregator=own).hparams
    assert found.of(Server).lr == 0.5
    with pytest.raises(UserError, match=r"expected sections=\(Krum,\)"):
        found.of(Krum)


def test_weights_by_size_have_no_limit():
    given = with_settings("dms", dms__by_size=True, dms__weight_limit=2.0)
    with pytest.raises(UserError, match="dms.by_size=True: .*no limit"):
        rule_settings.check(given, AGGREGATORS["dms"], Custom())


@pytest.mark.parametrize(("beta", "step"), [(0.5, 1.0), (0.95, 0.1)])
def test_fedavgms_default_step_follows_its_momentum(beta, step):
    given = with_settings("fedavgm", fedavgm__momentum=beta)
    found = prepare.hparams_of(given, AGGREGATORS["fedavgm"])
    np.testing.assert_allclose(found.of(FedAvgM).lr, step, rtol=1e-6)
