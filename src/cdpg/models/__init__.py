"""Language models by one interface: *start*, *advance* and *score*."""
