"""Records what storage sees: requests at application, file system and device, and measures of them."""
