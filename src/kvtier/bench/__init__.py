"""Benchmarks and the demo: each builds a result value first, then somebody renders it."""
