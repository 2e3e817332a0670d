"""Jobs: runs and comparisons as commands and configuration files describe them."""
