"""What ``import tsfl_jax`` imports, and what ``help`` shows."""

import json
import pathlib
import re
import subprocess
import sys

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
IMPORTS = """
import json, sys
import jax, flax, optax
before = set(sys.modules)
import tsfl_jax
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_only_what_every_run_needs_is_imported():
    command = [sys.executable, "-c", IMPORTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    new = json.loads(done.stdout)
    assert "tsfl_jax.run.runner" in new
    found = [n for n in new if any(n == m or n.startswith(f"{m}.") for m in LATE)]
    # Flax itself imports some of Orbax; the package adds nothing to it.
    assert not found and not [n for n in new if n.startswith("orbax.")]


def test_help_has_all_names_in_groups():
    _, _, listed = tsfl_jax.__doc__.partition("The names:\n\n")
    listed = listed.partition("\n\n")[0]
    names = re.findall(r"[\w.]+", re.sub(r"^  \S.*?  +", "", listed, flags=re.M))
    assert sorted(names) == sorted(set(names)) == sorted(tsfl_jax.__all__)
    assert all(hasattr(tsfl_jax, name) for name in names)
    groups = re.findall(r"^  (\S.*?)  +\w", listed, re.M)
    assert len(groups) >= 6
