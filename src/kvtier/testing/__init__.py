"""Contract suites: run them against your own tier, codec, policy or copier. `MemoryTier` is the reference tier."""
