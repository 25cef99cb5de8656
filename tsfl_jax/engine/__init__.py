"""The compiled program: one interval of all clients, and the scan over intervals."""
