"""How a payload becomes a frame: one file per codec, and the frame that carries identity and checksums."""
