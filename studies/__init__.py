"""The studies that produced docs/results, run from a checkout: see README.md."""
