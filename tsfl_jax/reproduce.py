"""``python -m tsfl_jax.reproduce``: see `tsfl_jax.studies.reproduce`."""

from tsfl_jax import command
from tsfl_jax.studies.reproduce import main

if __name__ == "__main__":
    command.run("tsfl reproduce", main)
