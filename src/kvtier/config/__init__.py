"""Settings: one frozen tree that is read once and knows the origin of every value."""
