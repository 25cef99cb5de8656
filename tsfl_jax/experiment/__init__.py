"""From settings to results: prepare, compile, run, sweep, explain."""
