"""Storage tiers below host memory: directories, a drive, and stores of several nodes. `registry` knows every kind."""
