"""What the secondary tier of vLLM's tiering manager is made of."""
