"""What moves bytes: the arena of slots, the mover's threads, and the session that an engine adapter holds."""
