"""Eviction policies, one file each, and `reuse`, the model that `adaptive` learns. No clock, I/O or threads."""
