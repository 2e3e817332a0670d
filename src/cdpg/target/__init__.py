"""The target p_c ∝ a · b: partition function, importance weights and divergences; mathematics only."""
