"""SGLang: a storage backend for HiCache, which SGLang imports by name."""
