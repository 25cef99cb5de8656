"""``python -m tsfl_jax.tensorboard``: see `tsfl_jax.report.tensorboard`."""

import sys

from tsfl_jax.report.tensorboard import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
