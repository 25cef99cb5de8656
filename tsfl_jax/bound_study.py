"""``python -m tsfl_jax.bound_study``: see `tsfl_jax.studies.bounds`."""

import sys

from tsfl_jax.studies.bounds import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
