"""Eviction policies, one file each, and `reuse`, the model that `adaptive` trains. None has a clock, I/O or threads."""
