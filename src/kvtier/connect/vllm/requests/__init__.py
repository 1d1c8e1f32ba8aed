"""Tracks a vLLM request: its keys, items, hints, state and history."""
