"""The places below host memory, one file each. Outsiders add theirs through the entry-point group `kvtier.tiers`."""
