"""Measures the bias of the gradient of each divergence at few samples a context; prints a Markdown table.

    python benchmarks/divergences.py [--repeats N]

Ẑ_c is the mean over the M samples themselves, and for all divergences but KL(p,π) the pseudo-reward is not linear in
1/Ẑ_c: the expected gradient is that of another objective, and comes to the exact one as M grows. The figure is
|E[ĝ] − g| / |g| over all contexts, where g is the exact gradient and the expectation is over draws of M samples of the
policy; in brackets what is left of it if the gradient of each context is given the right length. A policy is a table of
logits, one for each context and outcome: here those of the base with noise of deviation 0.7. Z_c differs between
contexts, with the mean that is named.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

from cdpg.methods.rloo import leave_one_out
from cdpg.target.f_divergences import Divergence, pseudo_reward

CONTEXTS, OUTCOMES = 8, 24
SAMPLES = (2, 4, 8, 16, 32, 64)
CHUNK = 500
"""Draws of all contexts that are made at once."""
ALPHA = 0.5
NAMES: dict[Divergence, str] = {
    "kl": "KL(p,π)",
    "js": "Jensen-Shannon",
    "tv": "total variation",
    "chi2": "χ²(p,π)",
    "alpha": f"α = {ALPHA}",
}


def make_world(z: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """log a and b, ``[context, outcome]``; the mean of Z_c over contexts is about ``z``."""
    generator = torch.Generator().manual_seed(seed)
    log_a = (1.5 * torch.randn(CONTEXTS, OUTCOMES, generator=generator, dtype=torch.float64)).log_softmax(dim=1)
    share = (z * (0.5 + torch.rand(CONTEXTS, 1, generator=generator, dtype=torch.float64))).clamp(max=1.0)
    b = (torch.rand(CONTEXTS, OUTCOMES, generator=generator, dtype=torch.float64) < share).double()
    b[:, 0] = 1.0  # every context can be satisfied
    return log_a, b


def gradient(log_pi: Tensor, coefficients: Tensor) -> Tensor:
    """Σ_x π(x) k(x) ∇log π(x) in the logits, ``[context, outcome]``."""
    weighted = log_pi.exp() * coefficients
    return weighted - log_pi.exp() * weighted.sum(dim=1, keepdim=True)


def expected(log_pi: Tensor, log_p: Tensor, divergence: Divergence, samples: int, repeats: int) -> Tensor:
    """E[k | x] · the rate at which x is drawn, over π(x): what the estimated gradient weighs each outcome with."""
    generator = torch.Generator().manual_seed(samples)
    reward = pseudo_reward(divergence, ALPHA)
    sums = torch.zeros_like(log_pi)
    for _ in range(repeats // CHUNK):
        uniforms = torch.rand(CHUNK, len(log_pi), samples, generator=generator, dtype=torch.float64)
        drawn = torch.searchsorted(log_pi.exp().cumsum(dim=1).repeat(CHUNK, 1), uniforms.flatten(0, 1))
        drawn = drawn.clamp(max=log_pi.shape[1] - 1)
        tiled = log_p.repeat(CHUNK, 1).gather(1, drawn) - log_pi.repeat(CHUNK, 1).gather(1, drawn)
        log_z = tiled.logsumexp(dim=1, keepdim=True) - torch.tensor(float(samples)).log()
        log_t = (tiled - log_z).where(tiled > -torch.inf, tiled.new_full((), -torch.inf))
        rewards = reward(log_t)
        centred = rewards - leave_one_out(rewards, torch.ones_like(rewards, dtype=torch.bool))
        by_context = torch.zeros_like(log_pi.repeat(CHUNK, 1)).scatter_add_(1, drawn, centred / samples)
        sums += by_context.view(CHUNK, *log_pi.shape).sum(dim=0)
    return sums / (repeats // CHUNK * CHUNK) / log_pi.exp()


def bias(z: float, divergence: Divergence, samples: int, repeats: int) -> tuple[float, float]:
    """|E[ĝ] − g| / |g|, and the same after each context's E[ĝ] is made as long as g."""
    log_a, b = make_world(z)
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(log_a.shape, generator=generator, dtype=torch.float64)
    log_pi = (log_a + 0.7 * noise).log_softmax(dim=1)
    log_p = log_a + b.log()
    log_t = (log_p.log_softmax(dim=1) - log_pi).where(b > 0, log_a.new_full((), -torch.inf))
    exact = gradient(log_pi, pseudo_reward(divergence, ALPHA)(log_t))
    found = gradient(log_pi, expected(log_pi, log_p, divergence, samples, repeats))
    rescaled = found * (exact.norm(dim=1, keepdim=True) / found.norm(dim=1, keepdim=True).clamp(min=1e-12))
    return float((found - exact).norm() / exact.norm()), float((rescaled - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20_000, help="draws that the expectation is taken over")
    repeats = parser.parse_args().repeats
    head = "| Z | divergence | " + " | ".join(f"M = {count}" for count in SAMPLES) + " |"
    lines = [head, "| --- | --- |" + " --- |" * len(SAMPLES)]
    for z in (0.4, 0.05):
        for divergence, name in NAMES.items():
            found = (bias(z, divergence, count, repeats) for count in SAMPLES)
            values = [f"{whole:.2f} ({direction:.2f})" for whole, direction in found]
            lines.append(f"| {z} | {name} | " + " | ".join(values) + " |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
