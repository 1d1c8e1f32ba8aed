"""Replays traces through one cache for hit rates and bounds, and through the real core over tiers in virtual time."""
