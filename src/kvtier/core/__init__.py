"""Decisions of the cache. Pure and synchronous: calls carry the time, and commands and events come out."""
