"""``python -m tsfl_jax.tensorboard``: see `tsfl_jax.report.tensorboard`."""

from tsfl_jax import command
from tsfl_jax.report.tensorboard import main

if __name__ == "__main__":
    command.run("tsfl tensorboard", main)
