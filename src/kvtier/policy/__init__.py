"""Eviction policies, one file each. Pure: no clock, I/O or threads."""
