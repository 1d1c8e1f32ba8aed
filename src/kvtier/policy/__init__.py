"""Eviction policies, one file each, and `reuse`, the model that `adaptive` learns. Pure: no clock, I/O or threads."""
