"""A whole run in plain NumPy: what a command must leave in its files, computed a second time.

Written from the definition of the method and from the documentation; nothing of the program is imported, and no torch.

Symbols: contexts c, the base a(x|c), the policy π(x|c), the proposal q(x|c) that the samples came from, the constraint
b(x,c) in [0, 1], the target P = a·b, its partition function Z_c = Σ_x P(x), the ideal model p = P/Z.
Axes are ``[context, sample, token]``, or ``[row, token]`` with rows counted context by context.
"""
