"""``python -m tsfl_jax.compare``: see `tsfl_jax.studies.compare`."""

from tsfl_jax import command
from tsfl_jax.studies.compare import main

if __name__ == "__main__":
    command.run("tsfl compare", main)
