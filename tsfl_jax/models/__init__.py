"""Networks, losses, and convolutions that are fast with one kernel per client."""
