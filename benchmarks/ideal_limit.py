"""How near a model can come to the ideal model p: fine-tuning on many exact samples of it.

    OMP_NUM_THREADS=1 python benchmarks/ideal_limit.py --task code-compilability --rates 3e-4,1e-3

Satisfying samples of the base are exact samples of p, so that fine-tuning on them by log-likelihood minimises KL(p, π)
without any noise of weights. What remains is what the model's size and the number of samples leave. The share that
satisfies and the gain E_p[log π − log a] are those of held-out contexts.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import time
from collections.abc import Sequence

import numpy as np
import torch

from cdpg.config import CDPGConfig
from cdpg.constraints.named import load_constraint
from cdpg.contexts.chats import as_chats
from cdpg.contexts.contexts import Context
from cdpg.models.base import LanguageModel
from cdpg.models.loading import load_policy_and_base
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples, draw_samples
from cdpg.models.scoring import plan_passes, prompts_and_rows, score_samples
from cdpg.tasks import TASKS
from cdpg.tasks.base import Draw, Task

logger = logging.getLogger("ideal_limit")


def drawn(
    model: LanguageModel, task: Task, contexts: Sequence[Context], each: int, config: CDPGConfig, stream: str
) -> tuple[Samples, torch.Tensor]:
    """Samples of a model and whether they satisfy, ``[context, sample]``."""
    prompts = model.encode(contexts, config.max_completion_length)
    uniforms = UniformStream(config.seed, stream, 0)
    with torch.no_grad(), model.sampling(config.rows_per_pass):
        samples = draw_samples(model, contexts, prompts, each, config, uniforms, task.stop)
    owners = [context for context in contexts for _ in range(each)]
    verdicts = load_constraint(task.constraint)(
        prompts=[context.prompt for context in owners],
        completions=[text for texts in samples.texts for text in texts],
        **{key: [context.columns[key] for context in owners] for key in owners[0].columns},
    )
    return samples, torch.tensor([float(verdict) > 0 for verdict in verdicts]).view(samples.shape)


def gain(model: LanguageModel, samples: Samples, satisfied: torch.Tensor, tokens: int) -> tuple[float, float]:
    """Mean over contexts of log π − log a on their satisfying samples, and its standard error."""
    rows = satisfied.flatten().nonzero()[:, 0]
    with torch.no_grad():
        log_policy = score_samples(model, samples, rows, tokens).sum(dim=2)
    difference = (log_policy - samples.log_q).where(satisfied, torch.zeros(()))
    covered = satisfied.any(dim=1)
    means = (difference.sum(dim=1) / satisfied.sum(dim=1).clamp(min=1))[covered].numpy()
    return float(means.mean()), float(means.std(ddof=1) / np.sqrt(len(means)))


def fine_tune(
    model: LanguageModel, samples: Samples, rows: torch.Tensor, optimiser: torch.optim.Optimizer, step_tokens: int
) -> None:
    """One pass over the samples in random order, each step on about ``step_tokens`` tokens; the rate falls to 0."""
    order = plan_passes(samples, rows, step_tokens)
    random.Random(0).shuffle(order)
    peak = optimiser.param_groups[0]["lr"]
    for number, part in enumerate(order):
        optimiser.param_groups[0]["lr"] = peak * min(1.0, (number + 1) / 20, 1 - number / len(order))
        scores = model.score(*prompts_and_rows(samples, part))
        loss = -scores.log_probs.sum() / scores.mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    optimiser.param_groups[0]["lr"] = peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="code-compilability", choices=sorted(TASKS))
    parser.add_argument("--model", help="instead of the task's")
    parser.add_argument("--each", type=int, default=16, help="samples of the base for each context to tune on")
    parser.add_argument("--passes", type=int, default=2, help="each with its own warm-up and decay of the rate")
    parser.add_argument("--rates", default="3e-4")
    parser.add_argument("--step-tokens", type=int, default=4096)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    task = TASKS[options.task]
    preset = task.presets["tiny"]
    config = CDPGConfig(**preset.settings)
    policy, base = load_policy_and_base(options.model or preset.model, config)
    rows, held_out_rows = preset.rows(Draw(0, task.usable))
    chat = config.chat, config.system
    contexts, held_out = (as_chats(task.contexts(part, preset.prefix), *chat) for part in (rows, held_out_rows))
    exact, exact_satisfied = drawn(base, task, held_out, 16, config, "exact")
    share = exact_satisfied.double().mean(dim=1)
    logger.info(
        "base: satisfies %.4f, held-out contexts %d, without %d", share.mean(), len(held_out), (share == 0).sum()
    )
    samples, satisfied = drawn(base, task, contexts, options.each, config, "tune")
    learnt = satisfied.flatten().nonzero()[:, 0]
    logger.info("%d samples of %d satisfy, %.0f s", len(learnt), satisfied.numel(), time.process_time())
    start = copy.deepcopy(policy.module.state_dict())
    for rate in map(float, options.rates.split(",")):
        policy.module.load_state_dict(start)
        optimiser = torch.optim.Adam(policy.module.parameters(), lr=rate)
        for number in range(1, options.passes + 1):
            fine_tune(policy, samples, learnt, optimiser, options.step_tokens)
            mean, error = gain(policy, exact, exact_satisfied, config.tokens_per_pass)
            own, _ = gain(policy, samples, satisfied & (torch.arange(len(contexts)) % 10 == 0)[:, None], 4096)
            _, hits = drawn(policy, task, held_out, 8, config, "final")
            logger.info(
                "rate %g, pass %d: satisfies %.4f, gain %.4f ± %.4f (learnt samples %.4f), %.0f s",
                *(rate, number, hits.double().mean(), mean, 1.96 * error, own, time.process_time()),
            )


if __name__ == "__main__":
    main()
