"""Records the requests that the application, the file system and the device see, and measures them."""
