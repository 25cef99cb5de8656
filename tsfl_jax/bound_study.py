"""``python -m tsfl_jax.bound_study``: see `tsfl_jax.studies.bounds`."""

from tsfl_jax import command
from tsfl_jax.studies.bounds import main

if __name__ == "__main__":
    command.run("tsfl bounds", main)
