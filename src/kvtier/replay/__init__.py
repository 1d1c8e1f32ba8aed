"""Replays of traces: hit rates of policies and their bounds, and the real core over tiers in virtual time."""
