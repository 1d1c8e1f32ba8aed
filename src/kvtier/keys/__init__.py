"""Who a chunk is: token-hash chain, object names, fingerprint, and the secret that keys them."""
