"""The studies that produced docs/results, run from a checkout: see README.md."""

import tsfl_jax.interrupts  # noqa: F401  # first, for Ctrl-C while importing
