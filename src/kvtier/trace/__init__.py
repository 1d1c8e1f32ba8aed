"""Request traces: one reader for each form, one packed form that everything replays."""
