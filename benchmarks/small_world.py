"""Contexts, a base model and a constraint small enough to enumerate; the world of ``estimators.py``.

An outcome has attributes ψ(x), a context has features φ(c), and the policy is log-linear in their products,

    log π(x|c) = log a(x|c) + φ(c)ᵀ W ψ(x) − log of the sum over outcomes,

so that what is learnt in one context holds in others. The features are a constant, the kind of the context, and noise
of its own: by the first two the constraint can be learnt, by the last a policy can memorise. An outcome satisfies if it
has a few attributes that are the same for all contexts and one that depends on the kind; a tenth of these outcomes,
different ones in each context, do not satisfy all the same, which no policy of this class can know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot


@dataclass(frozen=True)
class Sizes:
    """How large a world is."""

    training: int = 320
    """Contexts that are sampled."""
    set_aside: int = 48
    """Contexts whose gain guards the training."""
    held_out: int = 300
    """Contexts on which the result is measured."""
    outcomes: int = 128
    attributes: int = 16
    """Length of ψ(x)."""
    shared: int = 2
    """Attributes that every context asks for."""
    kinds: int = 6
    """Kinds of contexts; each asks for one attribute more."""
    noise: int = 24
    """Features that say nothing about the constraint."""
    noise_scale: float = 0.4
    """Their standard deviation."""
    dropped: float = 0.1
    """Share of the outcomes with all attributes that fail nevertheless."""
    exact_samples: int = 4
    """Samples of p for each context set aside."""

    @property
    def contexts(self) -> int:
        return self.training + self.set_aside + self.held_out


@dataclass(frozen=True)
class World:
    """One world for each seed; tensors ``[seed, context, …]``, training contexts first, held-out ones last."""

    sizes: Sizes
    features: Tensor
    """φ, ``[seed, context, feature]``."""
    attributes: Tensor
    """ψ, ``[seed, outcome, attribute]``."""
    log_a: Tensor
    """``[seed, context, outcome]``."""
    log_p: Tensor
    """The ideal model, ``[seed, context, outcome]``; −∞ where the constraint fails."""
    log_z: Tensor
    """``[seed, context]``."""
    exact: Tensor
    """Samples of p for the contexts set aside, ``[seed, context, sample]``."""
    floor: dict[str, Tensor]
    """The least mean KL(p,π) of the class on each set of contexts, ``[seed]``."""

    @property
    def sets(self) -> dict[str, slice]:
        """The contexts that figures are computed on."""
        return _sets(self.sizes)

    def log_policy(self, matrix: Tensor, rows: slice | Tensor) -> Tensor:
        """log π for ``matrix[rate, seed, feature, attribute]``; ``[rate, seed, context, outcome]``.

        ``rows`` is a slice of contexts, or their indices ``[rate, seed, context]``.
        """
        features, log_a = self._of(self.features, rows), self._of(self.log_a, rows)
        return (log_a + features @ matrix @ self.attributes.mT).log_softmax(dim=-1)

    def gradient(self, rows: slice | Tensor, log_pi: Tensor, coefficient: Tensor) -> Tensor:
        """−mean_c Σ_x coefficient(x,c) ∇log π(x|c), ``[rate, seed, feature, attribute]``."""
        score = coefficient - coefficient.sum(dim=-1, keepdim=True) * log_pi.exp()
        return -(self._of(self.features, rows).mT @ (score @ self.attributes)) / log_pi.shape[2]

    def log_target(self, rows: Tensor) -> Tensor:
        """log P = log a + log b, ``[rate, seed, context, outcome]``."""
        return self._of(self.log_p + self.log_z[..., None], rows)

    def excess(self, matrix: Tensor, name: str) -> Tensor:
        """Mean KL(p,π) over a set of contexts, less the least that the class can reach; ``[rate, seed]``."""
        rows = self.sets[name]
        return _divergence(self.log_p[:, rows], self.log_policy(matrix, rows)) - self.floor[name]

    def gains(self, matrix: Tensor) -> Tensor:
        """log π − log a of the exact samples, a mean for each context set aside; ``[rate, seed, context]``."""
        rows = slice(self.sizes.training, self.sizes.training + self.sizes.set_aside)
        gain = self.log_policy(matrix, rows) - self.log_a[:, rows]
        return gain.gather(3, self.exact.expand(len(matrix), -1, -1, -1)).mean(dim=3)

    def _of(self, table: Tensor, rows: slice | Tensor) -> Tensor:
        return table[:, rows] if isinstance(rows, slice) else table[torch.arange(len(table))[:, None], rows]


def make_world(z: float, seeds: int, sizes: Sizes) -> World:
    """Worlds whose base satisfies with probability ``z`` in the mean over contexts."""
    parts = [_make(z, torch.Generator().manual_seed(seed), sizes) for seed in range(seeds)]
    features, attributes, log_a, log_b, exact = (torch.stack(part) for part in zip(*parts, strict=True))
    log_z = (log_a + log_b).logsumexp(dim=2)
    log_p = log_a + log_b - log_z[..., None]
    floor = {
        name: _floor(features[:, rows], attributes, log_a[:, rows], log_p[:, rows])
        for name, rows in _sets(sizes).items()
    }
    return World(sizes, features, attributes, log_a, log_p, log_z, exact, floor)


def _sets(sizes: Sizes) -> dict[str, slice]:
    return {"training": slice(0, sizes.training), "held out": slice(sizes.training + sizes.set_aside, None)}


def _make(z: float, generator: torch.Generator, sizes: Sizes) -> tuple[Tensor, ...]:
    """φ, ψ, log a, log b of one seed, and samples of p."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kind = torch.randint(sizes.kinds, (sizes.contexts,), generator=generator)
    kinds = one_hot(kind, sizes.kinds).double()
    noise = sizes.noise_scale * normal(sizes.contexts, sizes.noise)
    features = torch.cat([torch.ones(sizes.contexts, 1, dtype=torch.float64), kinds, noise], dim=1)
    signs = torch.randint(2, (sizes.outcomes, sizes.attributes), generator=generator).double() * 2 - 1
    signs[0] = 1.0  # so that no context is without a satisfying outcome
    asked = torch.cat(
        [signs[:, : sizes.shared].expand(sizes.contexts, -1, -1), signs[:, sizes.shared + kind].T[..., None]], dim=2
    )
    kept = torch.rand(sizes.contexts, sizes.outcomes, generator=generator) >= sizes.dropped
    kept[:, 0] = True
    satisfied = (asked > 0).all(dim=2) & kept
    tastes = kinds @ normal(sizes.kinds, sizes.attributes) @ signs.T / sizes.attributes**0.5
    plain = tastes + normal(1, sizes.outcomes) + 0.5 * normal(sizes.contexts, sizes.outcomes)
    # The base avoids what the constraint asks for, more in some contexts than in others.
    log_a = _calibrated(z, plain, asked.mean(dim=2) / 2, 0.7 * normal(sizes.contexts, 1), satisfied)
    log_b = torch.where(satisfied, 0.0, -math.inf).double()
    rows = slice(sizes.training, sizes.training + sizes.set_aside)
    ideal = (log_a + log_b)[rows].softmax(dim=1)
    exact = torch.multinomial(ideal, sizes.exact_samples, replacement=True, generator=generator)
    return features, signs / sizes.attributes**0.5, log_a, log_b, exact


def _calibrated(z: float, plain: Tensor, wanted: Tensor, spread: Tensor, satisfied: Tensor) -> Tensor:
    """log a, its aversion to what is wanted found by bisection so that the mean of Z_c is ``z``."""
    low, high = -10.0, 60.0
    for _ in range(60):
        aversion = (low + high) / 2
        log_a = (plain - (aversion + spread) * wanted).log_softmax(dim=1)
        found = float((log_a.exp() * satisfied).sum(dim=1).mean())
        low, high = (aversion, high) if found > z else (low, aversion)
    return log_a


def _divergence(log_p: Tensor, log_pi: Tensor) -> Tensor:
    """The mean of KL(p,π) over contexts."""
    ideal = log_p.exp()
    return (ideal * (log_p.masked_fill(ideal == 0, 0.0) - log_pi)).sum(dim=-1).mean(dim=-1)


def _floor(features: Tensor, attributes: Tensor, log_a: Tensor, log_p: Tensor) -> Tensor:
    """The least mean KL(p,π) of the class, ``[seed]``."""
    return torch.stack([_least(*parts) for parts in zip(features, attributes, log_a, log_p, strict=True)])


def _least(phi: Tensor, psi: Tensor, log_a: Tensor, log_p: Tensor) -> Tensor:
    """The least over W, a convex problem, by L-BFGS."""
    matrix = torch.zeros(phi.shape[1], psi.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([matrix], max_iter=80, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = _divergence(log_p, (log_a + phi @ matrix @ psi.T).log_softmax(dim=1))
        value.backward()
        return value

    optimizer.step(loss)
    return loss().detach()
