"""The kind `valkey`: a Valkey server or cluster."""
