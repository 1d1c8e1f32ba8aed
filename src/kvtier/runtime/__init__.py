"""The session that an engine adapter calls, the mover's threads, and the arena of host slots."""
