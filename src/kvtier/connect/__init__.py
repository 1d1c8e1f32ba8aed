"""One package per engine. Only these import an engine or know its data structures."""
