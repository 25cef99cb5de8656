"""Seeds of single sources: each decides its own draws and nothing else."""

import jax
import pytest

from tsfl_jax.config import Config, replace
from tsfl_jax.experiment import identity, program
from tsfl_jax.experiment.prepare import prepare
from tsfl_jax.types import UserError

SMALL = {"num_intervals": 2, "num_clients": 4, "batch_size": 8, "lr": 0.05}
SMALL |= {"schedule.data_size": 16, "model.hidden": 4, "devices": 1}
SMALL |= {"schedule.kind": "case1"}


def small(**changes) -> Config:
    return replace(Config(), SMALL | changes)


def parts(prepared) -> dict[str, str]:
    """What each source has drawn, as text."""
    model, batches = program.keys_of(prepared)
    return {
        "model": str(jax.random.key_data(model)),
        "batches": str(jax.random.key_data(batches)),
        "split": prepared.fingerprints["split"],
        "fleet": prepared.fingerprints["schedule"],
    }


@pytest.mark.parametrize("source", ["model", "split", "fleet", "batches"])
def test_a_source_has_its_own_seed(source):
    # Sizes do not follow the fleet's seed here, so that the split does not either.
    drawn = {"schedule.kind": "distribution", "schedule.tau_groups": "uniform(1,9)"}
    plain = small(seed=3, **drawn)
    before = parts(prepare(plain))
    same = parts(prepare(replace(plain, {f"seeds.{source}": 3})))
    after = parts(prepare(replace(plain, {f"seeds.{source}": 4})))
    assert same == before
    assert [name for name in before if after[name] != before[name]] == [source]


def test_times_of_a_changed_file_are_another_experiment(tmp_path):
    """SFL with a slower slowest client: the same deliveries, later."""
    path, found = tmp_path / "speeds.csv", []
    for slowest in (1.7, 1.9):
        path.write_text(f"client,seconds\n0,{slowest}\n" + "1,0.5\n2,0.5\n3,0.5\n")
        files = {"timeline.framework": "sfl", "timeline.speeds": str(path)}
        found.append(prepare(small(num_intervals=20, algorithm="fedavg", **files)))
    one, other = (p.fingerprints for p in found)
    assert one["schedule"] == other["schedule"] and one["times"] != other["times"]
    assert identity.identity_of(found[0]) != identity.identity_of(found[1])
    assert "times" not in prepare(small()).fingerprints


def test_ranges():
    prepare(small(**{"seeds.model": 2**32 - 1}))
    with pytest.raises(UserError, match=r"--config.seeds.split=-2: must be"):
        prepare(small(**{"seeds.split": -2}))
