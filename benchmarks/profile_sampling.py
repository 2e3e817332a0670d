"""Profiles the drawing of an epoch's samples: the operations that take the most processor time, on one thread.

    python benchmarks/profile_sampling.py [--task code-compilability] [--operations 25]

The samples are those of the base of the task's tiny preset, unpruned.
"""

from __future__ import annotations

import argparse
import time

import torch

from cdpg.contexts.contexts import load_contexts
from cdpg.jobs.job import Job
from cdpg.models.loading import load_model
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import draw_samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="code-compilability")
    parser.add_argument("--operations", type=int, default=25, help="rows of the table")
    given = parser.parse_args()
    torch.set_num_threads(1)
    job = Job.from_mapping({"task": given.task})
    inputs, config = job.load(), job.settings
    model = load_model(job.model, config)
    contexts = load_contexts(inputs.tuning)[: config.contexts_per_epoch]
    prompts = model.encode(contexts, config.max_completion_length)
    uniforms, count = UniformStream(0, "profile", 1), config.num_generations
    since = time.process_time()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        samples = draw_samples(model, contexts, prompts, count, config, uniforms, inputs.stop)
    seconds, tokens = time.process_time() - since, int(samples.lengths.sum())
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=given.operations))
    print(f"{tokens} tokens in {seconds:.2f} s of processor time, profiled")


if __name__ == "__main__":
    main()
