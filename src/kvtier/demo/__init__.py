"""The demo: real conversations through a small model, without kvtier, with it, and after a restart."""
