"""Tokens per second of vLLM beside the sampler of this program, on the same prompts, and how far they agree.

    python benchmarks/engine.py MODEL --url http://localhost:8000 [--contexts 16] [--samples 32] [--tokens 48]

The server is started as docs/engines.md says. Each draws once to warm up and three times for the figures, in turns.
With ``--pid PID``, the process of a server on this machine, tokens per second of processor time are shown, too.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

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
    parser.add_argument("--pid", type=int, help="the server's process, to count its processor time")
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
    pids = {"own": os.getpid(), "vllm": options.pid}
    tokens, seconds, computing = (dict.fromkeys(engines, 0.0) for _ in range(3))
    samples = {}
    for number in range(4):
        for name, draw in engines.items():
            started, before = time.perf_counter(), _processor_seconds(pids[name])
            stream = UniformStream(0, "benchmark", number)
            chunks = list(draw(prompts, options.samples, options.tokens, stream, options.rows_per_pass))
            if number:
                seconds[name] += time.perf_counter() - started
                computing[name] += _processor_seconds(pids[name]) - before
                tokens[name] += sum(len(row) for chunk in chunks for row in chunk.tokens)
            samples[name] = assemble(contexts, prompts, chunks, options.samples)
    for name in engines:
        rate = f"{tokens[name] / seconds[name]:8,.0f} tokens/s"
        if computing[name]:
            rate += f", {tokens[name] / computing[name]:,.0f} a second of processor time"
        print(f"{name:>5}: {rate}, {tokens[name]:,.0f} tokens; {_agreement(model, samples[name])}")


def _processor_seconds(pid: int | None) -> float:
    """Of a process and all that it started; 0 without one."""
    if pid is None:
        return 0.0
    facts = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        facts[int(path.parent.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    family, total = [pid], 0.0
    for one in family:
        total += facts.get(one, (0, 0.0))[1]
        family += [child for child, (parent, _) in facts.items() if parent == one]
    return total


def _agreement(model: object, samples: Samples) -> str:
    rows = torch.arange(samples.lengths.numel())
    again = score_samples(model, samples, rows, 1280)  # type: ignore[arg-type]
    low, median, high = log_ratio_quantiles(samples.log_q.flatten(), again.sum(dim=2).flatten())
    largest = float((samples.token_log_q - again).abs().max())
    return f"log ratio of samples {low:.1e}, {median:.1e}, {high:.1e}; of a token at most {largest:.1e}"


if __name__ == "__main__":
    main()
