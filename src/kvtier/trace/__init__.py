"""Request traces: a reader for each format, and the columns that are replayed."""
