"""``python -m tsfl_jax.theory_report``: see `tsfl_jax.report.theory`."""

from tsfl_jax import command
from tsfl_jax.report.theory import main

if __name__ == "__main__":
    command.run("tsfl theory", main)
