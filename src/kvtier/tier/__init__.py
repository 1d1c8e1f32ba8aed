"""Storage tiers below host memory: directories, a drive, and stores that nodes share. `registry` lists every kind."""
