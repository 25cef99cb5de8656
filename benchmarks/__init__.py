"""Benchmarks: one command per table of docs/performance.md."""
