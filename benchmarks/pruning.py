"""Compares epochs with and without pruning: the tokens that are drawn, and the seconds that they take.

    python benchmarks/pruning.py [--task code-pep8] [--rare] [--model FOLDER] [--epochs 4] [--output FILE.json]
    python benchmarks/pruning.py --task code-pep8 --sound 10000

Two runs of the task's tiny preset take turns, one pruned and one not. Their learning rate is 0, so that they draw the
same samples of the base, and only the ends of hopeless samples differ. Machines are noisy: only ratios within one run
are meaningful.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rare import documented

from cdpg.jobs.job import Job
from cdpg.rollout.sampler import Stopwatch
from cdpg.training.setup import Parts, set_up

Record = dict[str, Any]


def make(given: argparse.Namespace, prune: bool, folder: Path) -> Parts:
    job = Job.from_mapping({"task": given.task} | ({"model": given.model} if given.model else {}))
    inputs = job.load()
    sizes = {"contexts_per_epoch": given.contexts, "num_generations": given.samples}
    config = job.settings.replace(
        prune=prune, output_dir=str(folder), learning_rate=0.0, replay=0, control_variate=given.control_variate,
        **{name: value for name, value in sizes.items() if value},
    )  # fmt: skip
    return set_up(
        config, job.model, documented if given.rare else inputs.constraints, inputs.tuning, inputs.held_out,
        processing_class=None, peft_config=None, stop=inputs.stop, measure=inputs.measure, command=None, inputs={},
    )  # fmt: skip


def cpu_of_workers(pid: int | None = None) -> float:
    """Seconds of computing time of all processes that this one started, and theirs; 0 where the system hides it."""
    pid = os.getpid() if pid is None else pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    ended = 0.0 if pid == os.getpid() else sum(map(int, fields[13:15]))  # of its own children
    own = 0.0 if pid == os.getpid() else sum(map(int, fields[11:13]))
    return (own + ended) / os.sysconf("SC_CLK_TCK") + sum(cpu_of_workers(int(child)) for child in children)


def epoch(parts: Parts, number: int) -> Record:
    """One epoch, steps included."""
    watch, config = Stopwatch(), parts.sampler.config
    since, cpu, workers = time.perf_counter(), time.process_time(), cpu_of_workers()
    chosen = parts.stream.draw(number - 1, config.contexts_per_epoch)
    contexts, prompts = [parts.contexts[i] for i in chosen], [parts.prompts[i] for i in chosen]
    every = parts.method.scores_every_sample
    rollout = parts.sampler.draw(number, contexts, prompts, every, watch, indices=chosen)
    parts.updater(config, lambda event: None).update(rollout, {**parts.method.begin(), "satisfying": 1.0})
    watch.lap("gradient")
    return {
        "seconds": time.perf_counter() - since,
        "cpu_seconds": time.process_time() - cpu,
        "cpu_seconds_workers": cpu_of_workers() - workers,
        "tokens": int(rollout.lengths.sum()),
        "satisfaction": float(rollout.b.mean()),
        "pruned": float(rollout.pruned.double().mean()),
        **{f"seconds_{stage}": seconds for stage, seconds in watch.seconds.items()},
    }


def compare(given: argparse.Namespace) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        sides = {prune: make(given, prune, Path(folder) / str(prune)) for prune in (False, True)}
        for parts in sides.values():
            epoch(parts, 1)  # starts workers and fills caches
        found: dict[bool, list[Record]] = {False: [], True: []}
        for number in range(2, given.epochs + 2):
            for prune in (False, True) if number % 2 else (True, False):
                found[prune].append(epoch(sides[prune], number))
                print(number, "pruned  " if prune else "unpruned", json.dumps(found[prune][-1]), flush=True)
        for parts in sides.values():
            parts.evaluator.close()
    keys = found[True][0]
    timed = [key for key in keys if key.startswith(("sec", "tok", "cpu"))]
    sums = {prune: {key: sum(record[key] for record in records) for key in keys} for prune, records in found.items()}
    return {
        "task": given.task,
        "rare": given.rare,
        "epochs": given.epochs,
        "satisfaction": sums[False]["satisfaction"] / given.epochs,
        "satisfaction_pruned": sums[True]["satisfaction"] / given.epochs,
        "pruned": sums[True]["pruned"] / given.epochs,
        **{f"ratio_{key}": sums[True][key] / sums[False][key] for key in timed if sums[False][key] > 0},
    }


def check_soundness(given: argparse.Namespace) -> Record:
    """Draws samples of the base until enough satisfy the constraint; none of their prefixes may be called hopeless."""
    with tempfile.TemporaryDirectory() as folder:
        parts = make(given, True, Path(folder))  # with the judge of prefixes, and samples that it does not end
        (check,) = parts.judge.prefix_checks
        config, model = parts.sampler.config.replace(prune=False), parts.base
        sampler = replace(parts.sampler, config=config)
        satisfying = asked = wrong = number = 0
        while satisfying < given.sound:
            number += 1
            chosen = parts.stream.draw(number - 1, config.contexts_per_epoch)
            contexts, prompts = [parts.contexts[i] for i in chosen], [parts.prompts[i] for i in chosen]
            rollout = sampler.draw(number, contexts, prompts, False, Stopwatch())
            owners, prefixes = [], []
            for context, sample in (rollout.b > 0).nonzero().tolist():
                tokens = rollout.samples.token_ids(context, sample)
                found = {model.decode(prompts[context], tokens[:end]) for end in range(1, len(tokens))}
                satisfying += 1
                owners += [contexts[context]] * len(found)
                prefixes += sorted(found)
            asked += len(prefixes)
            if prefixes:
                wrong += sum(check.collect(check.submit(owners, [text.rstrip("\ufffd") for text in prefixes])))
            print(number, {"satisfying": satisfying, "prefixes": asked, "wrong": wrong}, flush=True)
        parts.evaluator.close()
    return {"task": given.task, "satisfying": satisfying, "prefixes": asked, "called hopeless": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="code-compilability", choices=("code-compilability", "code-pep8"))
    parser.add_argument("--model", help="a causal model, instead of the task's base")
    parser.add_argument("--contexts", type=int, help="of an epoch, instead of the preset's")
    parser.add_argument("--samples", type=int, help="for each context, instead of the preset's")
    parser.add_argument("--rare", action="store_true", help="a constraint that few samples satisfy")
    parser.add_argument("--control-variate", action="store_true", help="take gradients of every sample")
    parser.add_argument("--epochs", type=int, default=4, help="of each side, after one to warm up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sound", type=int, help="look at all prefixes of so many satisfying samples instead")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = check_soundness(given) if given.sound else compare(given)
    text = json.dumps(found, indent=2)
    print(text)
    if given.output:
        given.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
