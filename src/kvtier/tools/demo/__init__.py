"""The demo. It sends real conversations through a small model without kvtier, with it, and after a restart."""
