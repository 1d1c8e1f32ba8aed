"""Keys: the token-hash chain, object names, the fingerprint, and the secret that keys them."""
