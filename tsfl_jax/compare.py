"""``python -m tsfl_jax.compare``: see `tsfl_jax.studies.compare`."""

import sys

from tsfl_jax.studies.compare import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
