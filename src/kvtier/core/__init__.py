"""The decisions of the cache. They are pure and synchronous: the time goes in, and commands and events come out."""
