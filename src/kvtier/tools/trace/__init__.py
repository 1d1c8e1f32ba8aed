"""Request traces: a reader for each format, and the arrays that replays use."""
