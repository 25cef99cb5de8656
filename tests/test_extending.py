"""The worked examples of docs/architecture.md run, each as it stands."""

import pathlib
import re
import types

import numpy as np
import pytest

import tsfl_jax
from tests import examples

TEXT = examples.text("architecture.md")
EXAMPLES = examples.examples("architecture.md", r"^### … an? (.+?)\n(.*?)(?=^##)")


def run(title: str) -> tuple[dict, str]:
    """Variables and output of an example."""
    return examples.run(EXAMPLES[title])


def test_each_kind_of_extension_has_an_example():
    kinds = {"aggregation rule", "data set", "network", "framework", "study"}
    assert set(EXAMPLES) == kinds


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_extension_touches_at_most_two_files_that_exist(title):
    section = TEXT.split(f" {title}\n")[1].split("```")[0]
    files = re.findall(r"`([\w/]+\.py)`", section.split(". ")[0])
    package = pathlib.Path(__file__).parents[1] / "tsfl_jax"
    assert len(files) <= 2
    assert all((package / name).exists() for name in files)


def test_a_rule():
    variables, _ = run("aggregation rule")
    history = variables["result"].history
    np.testing.assert_allclose(history["rho"].sum(axis=1), 1, rtol=1e-6)
    situation = types.SimpleNamespace(tau=np.array([1, 0, 2]), size=np.array([1, 1, 9]))
    weights = variables["rule"].weights(situation, None)
    np.testing.assert_allclose(weights.rho, [1 / 4, 0, 3 / 4], rtol=1e-6)


def test_a_rule_has_its_name_from_the_table_alone(monkeypatch):
    rule, config = run("aggregation rule")[0]["rule"], tsfl_jax.Config(num_intervals=2)
    monkeypatch.setitem(tsfl_jax.AGGREGATORS, "root", rule)
    config.algorithm, config.num_clients, config.batch_size = "root", 4, 8
    config.schedule.data_size = 32
    summary = tsfl_jax.simulate(config).summary
    assert summary["algorithm"] == "root"


def test_a_data_set():
    assert run("data set")[1] == "True\n"


def test_a_network():
    assert run("network")[1] == "(64, 16)\n"


def test_a_framework():
    variables, _ = run("framework")
    schedule, simulation = variables["schedule"], variables["simulation"]
    assert ((schedule.tau > 0).sum(axis=1) == 2).all() and len(schedule.tau) > 5
    assert schedule.tau[0].tolist() == [0, 2, 2, 0]  # 0.2 and 0.4 s per iteration
    assert schedule.seconds[:3].tolist() == [0.8, 1.6, 2.4]
    assert len(simulation.tasks) == 4 * len(schedule.tau)


def test_a_study():
    lines = run("study")[1].splitlines()
    assert [line.split(":")[0] for line in lines] == ["alpha 0.1", "alpha 10.0"]
