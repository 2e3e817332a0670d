"""Tokens per second of vLLM beside the sampler of this program, on the same prompts, and how far they agree.

    python benchmarks/engine.py MODEL --url http://localhost:8000 [--contexts 16] [--samples 32] [--tokens 48]

The server is started as docs/engines.md says. Each draws once to warm up and three times for the figures.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch

from cdpg import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.models.engines.server import Server
from cdpg.models.engines.vllm import VLLMEngine
from cdpg.models.loading import load_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Samples, assemble, sample_chunks
from cdpg.models.scoring import score_samples
from cdpg.target.proposal import log_ratio_quantiles

_WORDS = ("bread", "rain", "music", "horses", "money", "sleep", "winter", "maps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--url", required=True)
    parser.add_argument("--contexts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows-per-pass", type=int, default=256)
    options = parser.parse_args()
    config = CDPGConfig(device="auto", max_completion_length=options.tokens, rows_per_pass=options.rows_per_pass)
    model = load_model(options.model, config)
    contexts = [
        Context(f"{number + 1} facts about {_WORDS[number % len(_WORDS)]}:", {}, number + 1)
        for number in range(options.contexts)
    ]
    prompts = model.encode(contexts, options.tokens)
    server = Server.at(options.url, 3600.0, max(map(len, prompts)) + options.tokens)
    engines = {
        "own": partial(sample_chunks, model),
        "vllm": VLLMEngine(server, model, model.vocabulary).sample_chunks,
    }
    print(f"{len(prompts)} prompts, {options.samples} samples each, {torch.get_num_threads()} threads here")
    for name, draw in engines.items():
        tokens, seconds, samples = 0, 0.0, None
        for number in range(4):
            started = time.perf_counter()
            stream = UniformStream(0, "benchmark", number)
            chunks = list(draw(prompts, options.samples, options.tokens, stream, options.rows_per_pass))
            if number:
                seconds += time.perf_counter() - started
                tokens += sum(len(row) for chunk in chunks for row in chunk.tokens)
            samples = assemble(contexts, prompts, chunks, options.samples)
        assert samples is not None
        print(f"{name:>5}: {tokens / seconds:8,.0f} tokens/s, {tokens:,} tokens; {_agreement(model, samples)}")


def _agreement(model: object, samples: Samples) -> str:
    rows = torch.arange(samples.lengths.numel())
    again = score_samples(model, samples, rows, 1280)  # type: ignore[arg-type]
    low, median, high = log_ratio_quantiles(samples.log_q.flatten(), again.sum(dim=2).flatten())
    largest = float((samples.token_log_q - again).abs().max())
    return f"log ratio of samples {low:.1e}, {median:.1e}, {high:.1e}; of a token at most {largest:.1e}"


if __name__ == "__main__":
    main()
