"""The kind `shared_directory`: a directory on a network file system, for many nodes."""
