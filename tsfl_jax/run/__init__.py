"""From arrays to results: programs, calls, files, sweeps."""
