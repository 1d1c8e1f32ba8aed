"""Request traces. Each format has a reader, and replays use columns."""
