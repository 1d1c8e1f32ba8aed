"""The kind `directory`: a file for each object, for any number of processes of one machine."""
