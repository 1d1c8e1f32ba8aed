"""Contract suites to run against your own tier, codec, policy or copier. `MemoryTier` is the reference tier."""
