"""Worker processes for functions that may hang or crash."""
