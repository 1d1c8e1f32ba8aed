"""Replays traces, for hit rates of policies and their bounds, and through the real core over tiers in virtual time."""
