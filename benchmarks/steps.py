"""Times the parts of a decoding step on one thread, in processor time: the least of some repeats at each position.

    python benchmarks/steps.py [--task code-compilability] [--rows 512] [--positions 44] [--repeats 3] [--model FOLDER]
    PYTHONPATH=../old/src python benchmarks/steps.py …    an older version of the package
    python benchmarks/steps.py --caches                   attention over caches of different layouts

No row ends. The least of several repeats has little of the noise of a busy machine in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def time_steps(given: argparse.Namespace) -> None:
    from cdpg.contexts.contexts import load_contexts
    from cdpg.jobs.job import Job
    from cdpg.models import sampling
    from cdpg.models.loading import load_model

    draw_tokens: Any = vars(sampling)["draw_tokens"]  # older versions define it there
    job = Job.from_mapping({"task": given.task} | ({"model": given.model} if given.model else {}))
    config, count = job.settings, job.settings.num_generations
    model = load_model(job.model, config)
    contexts = load_contexts(job.load().tuning)[: -(-given.rows // count)]
    prompts, context = model.encode(contexts, config.max_completion_length), torch.arange(given.rows) // count
    uniforms = torch.rand(given.rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    least = torch.full((given.positions, 2), float("inf"))
    for _ in range(given.repeats):
        with torch.inference_mode(), model.sampling(given.rows):
            decoding = model.start(prompts, context, given.positions + 1)
            for position in range(given.positions):
                moments = [time.process_time()]
                tokens, _ = draw_tokens(model.logits(decoding.hidden), uniforms)
                moments.append(time.process_time())
                decoding.advance(tokens)
                moments.append(time.process_time())
                least[position] = torch.minimum(least[position], torch.tensor(moments).diff())
    drawing, steps = (1000 * least.mean(dim=0)).tolist()
    rate = given.rows * given.positions / float(least.sum())
    print(f"{given.rows} rows: logits and drawing {drawing:.1f} ms, decoder {steps:.1f} ms; {rate:.0f} tokens/s")


def time_caches(rows: int, heads: int, features: int, positions: int, layers: int = 4) -> None:
    """One query a row and head; several layers, so that a layer's cache is not in the processor's cache."""
    count = rows * heads
    query = torch.randn(count, 1, features)

    def attend(keys: Tensor, values: Tensor) -> None:
        torch.bmm(torch.bmm(query, keys.transpose(1, 2)).softmax(dim=2), values)

    room = 2 * positions
    caches = {
        "without gaps": [torch.randn(2, count, positions, features) for _ in range(layers)],
        "room for twice as many": [torch.randn(2, count, room, features)[:, :, :positions] for _ in range(layers)],
        "by position": [torch.randn(2, positions, count, features).transpose(1, 2) for _ in range(layers)],
    }
    found = {
        name: least_time(lambda cache=cache: [attend(*layer) for layer in cache]) for name, cache in caches.items()
    }
    print(f"{rows} rows, {heads} heads of {features}, {positions} positions, ms a layer:", end=" ")
    print(", ".join(f"{name} {1000 * seconds / layers:.2f}" for name, seconds in found.items()), flush=True)


def least_time(run: Callable[[], Any], repeats: int = 10) -> float:
    times = []
    for _ in range(repeats):
        since = time.process_time()
        run()
        times.append(time.process_time() - since)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="code-compilability")
    parser.add_argument("--model", help="a folder, instead of the task's base")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--positions", type=int, default=44)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--caches", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.caches:
        with torch.inference_mode():
            time_caches(512, 5, 32, 40)
            time_caches(512, 5, 32, 16)
            time_caches(512, 4, 48, 12)
    else:
        time_steps(given)


if __name__ == "__main__":
    main()
