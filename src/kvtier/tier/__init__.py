"""Storage tiers below host memory: a directory of files, and a disk with segment files."""
