"""Metrics: their definitions, and the counters of a process."""
