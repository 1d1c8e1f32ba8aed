"""Contract suites to run against your own tier, codec, policy or copier, and `example_tier`, a complete tier."""
