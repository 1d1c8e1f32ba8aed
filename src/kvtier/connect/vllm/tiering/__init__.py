"""Contains the parts of kvtier's secondary tier for vLLM's tiering manager."""
