"""What storage sees: requests at application, file system and device, and what they measure."""
