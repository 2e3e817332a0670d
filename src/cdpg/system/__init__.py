"""The operating system: files, memory, signals, threads and processes."""
