"""Contains the session that an engine adapter calls, the mover with its threads, and the arena of host slots."""
