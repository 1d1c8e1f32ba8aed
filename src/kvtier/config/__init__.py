"""Settings: one frozen tree, read once, with the origin of every value."""
