"""The kind `disk`: preallocated segments on a local drive, for one process."""
