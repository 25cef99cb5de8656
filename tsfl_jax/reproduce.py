"""``python -m tsfl_jax.reproduce``: see `tsfl_jax.studies.reproduce`."""

import sys

from tsfl_jax.studies.reproduce import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
