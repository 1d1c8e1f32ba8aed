"""The decisions of the cache. They are pure and synchronous: calls pass the time, and return commands and events."""
