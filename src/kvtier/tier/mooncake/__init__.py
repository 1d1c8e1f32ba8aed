"""The kind `mooncake`: a Mooncake store."""
