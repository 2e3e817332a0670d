"""Compares two versions of the package, in processor time: tokens a second, and the seconds of an epoch.

    git worktree add ../old COMMIT
    python benchmarks/versions.py --old ../old/src [--new src] [--task translation-numbers] [--what sampling,epoch]
        [--model FOLDER]

Both versions run the task's tiny preset, each in a process of its own, on one thread, and take turns: only the ratios
are meaningful. ``sampling`` draws an epoch's samples from the base, unpruned; ``epoch`` is a whole epoch of training
(samples, checks, base, steps, replayed steps, validation) with every replayed step taken; ``evaluation`` evaluates the
base on some held-out contexts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = ("sampling", "epoch", "evaluation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", required=True, help="the folder src of the version to compare with")
    parser.add_argument("--new", default=str(Path(__file__).resolve().parents[1] / "src"))
    parser.add_argument("--task", default="translation-numbers")
    parser.add_argument("--model", help="for both, instead of the base that each version has")
    parser.add_argument("--what", default=",".join(PARTS[:2]), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--turns", type=int, default=4, help="of each side, after one to warm up")
    parser.add_argument("--prune", action="store_true", help="end hopeless samples, in an epoch")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return work(given)
    sides = {name: start(getattr(given, name)) for name in ("old", "new")}
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for part in given.what.split(","):
        found[part] = {"old": [], "new": []}
        for turn in range(given.turns + 1):
            for name in ("old", "new") if turn % 2 else ("new", "old"):
                record = ask(sides[name], part, turn)
                if turn:
                    found[part][name].append(record)
                    print(part, turn, name, json.dumps(record), flush=True)
        print(json.dumps({"task": given.task, "part": part, **ratios(found[part])}), flush=True)
    for side in sides.values():
        assert side.stdin is not None
        side.stdin.close()
        side.wait()


def start(source: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(source).resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(side: subprocess.Popen[str], part: str, turn: int) -> dict[str, float]:
    assert side.stdin is not None and side.stdout is not None
    print(part, turn, file=side.stdin, flush=True)
    found: dict[str, float] = json.loads(side.stdout.readline())
    return found


def ratios(found: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Old over new: above 1 the new version is faster. The least of several turns has the least noise."""
    of_sums, of_least = {}, {}
    for key in found["old"][0]:
        old, new = ([record[key] for record in found[name]] for name in ("old", "new"))
        if sum(new) > 0:
            of_sums[key], of_least[f"{key}_least"] = sum(old) / sum(new), min(old) / min(new)
    return {key: round(value, 3) for key, value in {**of_sums, **of_least}.items()}


def work(given: argparse.Namespace) -> None:
    """One side: does the parts that are asked for, and answers with what they took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    import torch

    torch.set_num_threads(1)
    side = Side(given)
    for line in sys.stdin:
        part, turn = line.split()
        print(json.dumps(getattr(side, part)(int(turn))), file=answers, flush=True)
    side.close()


class Side:
    """The task's tiny preset, set up once."""

    def __init__(self, given: argparse.Namespace) -> None:
        import tempfile
        from dataclasses import replace

        from cdpg.jobs.job import Job
        from cdpg.training.setup import set_up

        job = Job.from_mapping({"task": given.task} | ({"model": given.model} if given.model else {}))
        inputs, self.folder = job.load(), tempfile.TemporaryDirectory()
        # Without a warm-up, in which there are fewer replayed steps.
        self.config = job.settings.replace(prune=given.prune, output_dir=self.folder.name, warmup_epochs=0)
        self.parts = set_up(
            self.config, job.model, inputs.constraints, inputs.tuning, inputs.held_out, processing_class=None,
            peft_config=None, stop=inputs.stop, measure=inputs.measure, command=None, inputs={},
        )  # fmt: skip
        self.state = self.parts.initial_state()
        if "epoch" in given.what:
            self.parts.validation.begin(self.config, lambda: None)
            if self.parts.validation.is_measured:
                best = self.parts.validation.of_base()
                self.state = replace(self.state, best=best, **self._known(gains=best.peak))

    def sampling(self, turn: int) -> dict[str, float]:
        from cdpg.models.rng import UniformStream
        from cdpg.models.sampling import draw_samples

        chosen = self.parts.stream.draw(turn, self.config.contexts_per_epoch)
        contexts, prompts = [self.parts.contexts[i] for i in chosen], [self.parts.prompts[i] for i in chosen]
        uniforms, stop = UniformStream(0, "benchmark", turn), self.parts.sampler.stop
        since = time.process_time()
        per_context = self.config.num_generations
        drawn = draw_samples(self.parts.base, contexts, prompts, per_context, self.config, uniforms, stop)
        seconds, tokens = time.process_time() - since, int(drawn.lengths.sum())
        return {"seconds": seconds, "seconds_per_token": seconds / tokens}

    def epoch(self, turn: int) -> dict[str, float]:
        from dataclasses import replace
        from inspect import signature

        from cdpg.rollout.sampler import Stopwatch
        from cdpg.training.epoch import Epoch

        epoch = Epoch(turn + 1, self.parts, self._updater(), self.config, lambda: None)
        epoch._watch = watch = Stopwatch(time.process_time)
        since = time.process_time()
        rollout = epoch.sample(*[self.state][: len(signature(epoch.sample).parameters)])  # older ones take no state
        _, state = epoch.update(rollout, self.state)
        _, self.state = epoch.validate(state)
        seconds = time.process_time() - since
        if self.state.best is not None:  # so that every epoch replays
            best = replace(self.state.best, epoch=turn + 1)  # which older versions look at
            self.state = replace(self.state, best=best, **self._known(fell=False))
        return {"seconds": seconds, **{f"seconds_{stage}": value for stage, value in watch.seconds.items()}}

    def evaluation(self, turn: int) -> dict[str, float]:
        since = time.process_time()
        self.parts.evaluator.outcome("base", self.parts.base, limit=16)
        return {"seconds": time.process_time() - since}

    def _known(self, **fields: Any) -> dict[str, Any]:
        """Those of the fields that the state of a run has in this version."""
        return {name: value for name, value in fields.items() if hasattr(self.state, name)}

    def _updater(self) -> Any:
        return self.parts.updater(self.config, lambda event: None)

    def close(self) -> None:
        self.parts.evaluator.close()
        self.folder.cleanup()


if __name__ == "__main__":
    main()
