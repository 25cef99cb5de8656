"""What ``import tsfl_jax`` costs, and what ``help`` shows."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import tsfl_jax

ROOT = pathlib.Path(__file__).parents[1]
# Needed by some runs only; together they take longer to import than JAX.
LATE = [
    "IPython",
    "array_record",
    "matplotlib",
    "pandas",
    "requests",
    "scipy.optimize",
    "scipy.stats",
    "sklearn",
    "tensorboardX",
    "tensorflow",
    "tensorflow_datasets",
]
# Imported one after the other in one process, so that both see the same machine.
IMPORTS = """
import json, sys, time
start = time.process_time()
import jax, flax, optax
before, middle = set(sys.modules), time.process_time()
import tsfl_jax
end = time.process_time()
new = sorted(set(sys.modules) - before)
print(json.dumps([middle - start, end - middle, new]))
"""


@pytest.fixture(scope="module")
def imported():
    """CPU seconds of JAX, Flax and optax; of the package after them; its modules."""
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_only_what_every_run_needs_is_imported(imported):
    new = imported[2]
    assert "tsfl_jax.run.runner" in new
    found = [n for n in new if any(n == m or n.startswith(f"{m}.") for m in LATE)]
    # Flax itself imports some of Orbax; the package adds nothing to it.
    assert not found and not [n for n in new if n.startswith("orbax.")]


def test_an_import_takes_a_fraction_of_that_of_jax(imported):
    """A quarter where bytecode is kept; without, Python compiles all files first."""
    libraries, package, _ = imported
    assert package < 0.8 * libraries


def test_help_has_all_names_in_groups():
    _, _, listed = tsfl_jax.__doc__.partition("The names:\n\n")
    listed = listed.partition("\n\n")[0]
    names = re.findall(r"[\w.]+", re.sub(r"^  \S.*?  +", "", listed, flags=re.M))
    assert sorted(names) == sorted(set(names)) == sorted(tsfl_jax.__all__)
    groups = re.findall(r"^  (\S.*?)  +\w", listed, re.M)
    assert len(groups) >= 6
