"""The kind `directory`: a file for each object, for any number of processes on one machine."""
