"""The training loop and what it shows, logs and writes."""
