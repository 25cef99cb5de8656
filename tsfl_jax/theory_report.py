"""``python -m tsfl_jax.theory_report``: see `tsfl_jax.report.theory`."""

import sys

from tsfl_jax.report.theory import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
