"""A race to quality: the same base, prompts, check and minutes for cdpg, TRL's GRPO and disco.

    pip install -e '.[benchmark]'
    python benchmarks/race.py --task code-compilability --minutes 6 --folder race
    python benchmarks/race.py --task code-compilability --racers cdpg,disco --disco ../disco --folder race-disco

Each racer trains in a process of its own, one after the other, and saves its model at several moments. The clock runs
from the first step on, for cdpg from the samples before it that are for validation; it stands still while a model is
saved. Rates are constant, without a warm-up. ``cdpg evaluate`` then judges every saved model on the task's held-out
contexts: satisfaction, gain, KL(π, a) and Distinct-2, as a table, a JSON file and a figure. A racer that has trained in
the folder before is not trained again, whatever the options are.

The rivals have no rule that ends a sample in the middle of a text. Their check sees the sample cut where the rule ends
it, as the evaluation does. disco is not installed: its checkout is handed over by its path.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]

RACERS = {
    "cdpg": "cdpg",
    "grpo": "GRPO",
    "grpo-kl": "GRPO, KL penalty",
    "disco": "disco",
}
COLOURS = {"cdpg": "#0b6fd8", "grpo": "#d1495b", "grpo-kl": "#e08e45", "disco": "#66717e"}
METRICS = {
    "satisfaction": "satisfaction",
    "gain": "gain, nats",
    "kl_policy_base": "KL(π, a), nats",
    "distinct_2": "Distinct-2",
}
KL_PENALTY = 0.04


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="code-compilability", help="a task of a causal model")
    parser.add_argument("--model", help="a folder or a name, instead of the task's base")
    parser.add_argument("--racers", default="cdpg,grpo,grpo-kl", help=f"some of {', '.join(RACERS)}")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training, for each racer")
    parser.add_argument("--snapshots", type=int, default=3, help="models that each racer saves")
    parser.add_argument("--contexts", type=int, help="in a step, instead of the preset's")
    parser.add_argument("--samples", type=int, help="for each context, instead of the preset's")
    parser.add_argument("--rate", action="append", default=[], metavar="RACER=RATE", help="a racer's learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--disco", help="the folder of a checkout of disco")
    parser.add_argument("--folder", required=True, help="for models, figures and results")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.rate = dict(rate.split("=") for rate in given.rate)
    if given.train:
        return train(given)
    racers = given.racers.split(",")
    if unknown := sorted({*racers, *given.rate} - set(RACERS)):
        parser.error(f"no racer is called {', '.join(unknown)}: expected some of {', '.join(RACERS)}")
    if "disco" in racers and not given.disco:
        parser.error("for disco, give the folder of its checkout: --disco FOLDER")
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    results = {name: race(name, given, folder / name) for name in racers}
    (folder / "race.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    show(results)
    draw(results, folder / "race.png")
    return None


# What runs in this process.


def race(name: str, given: argparse.Namespace, folder: Path) -> list[Record]:
    """One racer's training, then the figures of each model that it saved."""
    folder.mkdir(exist_ok=True)
    if not (folder / "saved.json").exists():
        command = [sys.executable, __file__, *sys.argv[1:], "--train", name]
        log = folder / "train.log"
        print(f"{RACERS[name]}: training for {given.minutes:g} minutes, see {log}", flush=True)
        with log.open("w", encoding="utf-8") as output:
            if subprocess.run(command, stdout=output, stderr=output, check=False).returncode:
                raise SystemExit(f"{RACERS[name]} failed:\n{log.read_text(encoding='utf-8')[-3000:]}")
    saved: list[Record] = json.loads((folder / "saved.json").read_text(encoding="utf-8"))
    return [record | evaluated(Path(record["model"]), given) for record in saved]


def evaluated(model: Path, given: argparse.Namespace) -> Record:
    """The figures of a model by ``cdpg evaluate``, and those of the base beside it."""
    output = model.with_suffix(".json")
    if not output.exists():
        command = [sys.executable, "-m", "cdpg", "evaluate", str(model), "--task", given.task, "--output", str(output)]
        command += ["--base", given.model] if given.model else []
        print(f"evaluating {model}", flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads(output.read_text(encoding="utf-8"))
    return {kind: {metric: found[kind].get(metric) for metric in METRICS} for kind in ("base", "tuned")}


def show(results: dict[str, list[Record]]) -> None:
    print(f"\n{'':<18}{'minutes':>8}{'steps':>7}" + "".join(f"{label:>26}" for label in METRICS.values()))
    first = next(iter(results.values()))[0]
    print(f"{'base':<18}{0:>8.1f}{0:>7}" + "".join(cell(first["base"][metric]) for metric in METRICS))
    for name, records in results.items():
        for record in records:
            cells = "".join(cell(record["tuned"][metric]) for metric in METRICS)
            print(f"{RACERS[name]:<18}{record['minutes']:>8.1f}{record['steps']:>7}{cells}")


def cell(figure: Record | None) -> str:
    if figure is None or figure["mean"] is None:
        return f"{'–':>26}"
    interval = f"[{figure['low']:.3f}, {figure['high']:.3f}]" if figure.get("low") is not None else ""
    return f"{figure['mean']:>8.3f} {interval:>17}"


def draw(results: dict[str, list[Record]], path: Path) -> None:
    """Each metric over the minutes of training."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    from cdpg.report.style import rc_settings

    with matplotlib.rc_context(rc_settings()):
        figure = Figure(figsize=(3.2 * len(METRICS), 3.0), layout="constrained")
        panels: Any = figure.subplots(1, len(METRICS))
        for axes, (metric, label) in zip(panels, METRICS.items(), strict=True):
            for name, records in results.items():
                base = records[0]["base"][metric]
                points = [(0.0, base), *((record["minutes"], record["tuned"][metric]) for record in records)]
                known = [(minutes, value["mean"]) for minutes, value in points if value and value["mean"] is not None]
                axes.plot(*zip(*known, strict=True), color=COLOURS[name], marker="o", label=RACERS[name])
            axes.set_xlabel("minutes of training")
            axes.set_title(label)
        panels[0].legend()
        figure.savefig(path)


# What runs in a racer's process.


class Clock:
    """Counts the seconds of training, and saves the model when a moment has come."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._total, self._folder = 60 * given.minutes, folder
        self._moments = [self._total * (number + 1) / given.snapshots for number in range(given.snapshots)]
        self._since, self._paused, self._steps = 0.0, 0.0, 0
        self._saved: list[Record] = []

    def begin(self) -> None:
        """Start the clock, unless it runs."""
        self._since = self._since or time.perf_counter()

    def step(self, save: Callable[[str], object]) -> bool:
        """After a step: save the model if it is time; whether the race is over."""
        self._steps += 1
        now = time.perf_counter()
        seconds = now - self._since - self._paused
        if self._moments and seconds >= self._moments[0]:
            self._moments = [moment for moment in self._moments if moment > seconds]
            model = self._folder / f"model-{len(self._saved) + 1}"
            save(str(model))
            self._saved.append({"minutes": seconds / 60, "steps": self._steps, "model": str(model)})
            (self._folder / "saved.json.part").write_text(json.dumps(self._saved), encoding="utf-8")
            self._paused += time.perf_counter() - now
        return not self._moments

    def finish(self) -> None:
        (self._folder / "saved.json.part").rename(self._folder / "saved.json")


class Task:
    """What all racers share: the base, the prompts and the check."""

    def __init__(self, given: argparse.Namespace, rate: str | None) -> None:
        from transformers import AutoTokenizer

        from cdpg.jobs.job import Job
        from cdpg.models.names import locate

        job = Job.from_mapping({"task": given.task} | ({"model": given.model} if given.model else {}))
        self.inputs, settings = job.load(), job.settings
        changes: Record = {"contexts_per_epoch": given.contexts, "num_generations": given.samples}
        changes |= {"learning_rate": float(rate) if rate else None}
        self.settings = settings.replace(**{key: value for key, value in changes.items() if value is not None})
        self.model = locate(job.model)
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token

    def rows(self) -> list[Record]:
        """Prompts as text, with the columns that the check gets; ``row`` finds a context again."""
        return [
            {"prompt": self.text(context.prompt), "row": number} for number, context in enumerate(self.inputs.tuning)
        ]

    def text(self, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(self.tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True))

    def save(self, model: Any, folder: str) -> None:
        """Write a racer's model as a plain folder."""
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def verdicts(self, rows: Sequence[int], completions: Sequence[str]) -> list[float]:
        """The product of the constraints on completions that are cut where the task ends them."""
        contexts = [self.inputs.tuning[row] for row in rows]
        rule = self.inputs.stop
        texts = [text if rule is None or (cut := rule.cut(text)) is None else cut for text in completions]
        columns = {key: [context.columns[key] for context in contexts] for key in contexts[0].columns}
        prompts, found = [context.prompt for context in contexts], [1.0] * len(texts)
        for constraint in self.inputs.constraints:
            values = constraint(prompts=prompts, completions=texts, **columns)
            found = [b * float(value or 0) for b, value in zip(found, values, strict=True)]
        return found


def train(given: argparse.Namespace) -> None:
    """One racer's training, in this process."""
    import torch

    torch.set_num_threads(given.threads)
    folder = Path(given.folder) / given.train
    clock, task = Clock(given, folder), Task(given, given.rate.get(given.train))
    if given.train == "cdpg":
        train_cdpg(task, clock, folder)
    elif given.train == "disco":
        train_disco(task, clock, given.disco)
    else:
        train_grpo(task, clock, folder, KL_PENALTY if given.train == "grpo-kl" else 0.0)
    clock.finish()


def timed(clock: Clock, save: Callable[[str], object]) -> Any:
    """A callback of Hugging Face's trainers, and of ours, that keeps the time and ends the training."""
    from transformers import TrainerCallback

    class Timed(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            control.should_training_stop = clock.step(save)

    return Timed()


def train_cdpg(task: Task, clock: Clock, folder: Path) -> None:
    from cdpg import CDPGTrainer

    settings = task.settings.replace(
        output_dir=str(folder / "run"), epochs=10**6, warmup_epochs=0, decay_epochs=0, evaluate_every=0,
        evaluate_at_end=False, save_every=10**6,
    )  # fmt: skip
    callbacks = [timed(clock, lambda folder: trainer.save_model(folder))]
    trainer = CDPGTrainer(
        task.model, task.inputs.constraints, settings, task.inputs.tuning, callbacks=callbacks, stop=task.inputs.stop
    )
    clock.begin()
    trainer.train()


def train_grpo(task: Task, clock: Clock, folder: Path, beta: float) -> None:
    from datasets import Dataset
    from epoch import plain_model
    from grpo import grpo_config
    from trl import GRPOTrainer

    settings = task.settings
    completions = settings.samples_per_epoch
    config = grpo_config(
        str(folder / "run"), settings.num_generations, completions, math.gcd(64, completions),
        beta=beta, max_completion_length=settings.max_completion_length, learning_rate=settings.learning_rate,
    )  # fmt: skip

    def reward(prompts: list[str], completions: list[str], row: list[int], **rest: Any) -> list[float]:
        return task.verdicts(row, completions)

    trainer = GRPOTrainer(
        plain_model(task.model), reward, args=config, train_dataset=Dataset.from_list(task.rows()),
        processing_class=task.tokenizer, callbacks=[timed(clock, lambda folder: task.save(trainer.model, folder))],
    )  # fmt: skip
    trainer.train()


def train_disco(task: Task, clock: Clock, checkout: str) -> None:
    import torch
    from epoch import plain_model

    sys.path.insert(0, checkout)
    from disco.distributions import LMDistribution
    from disco.scorers import BooleanScorer
    from disco.tuners import CDPGTuner

    settings, rows = task.settings, task.rows()
    number_of = {row["prompt"]: row["row"] for row in rows}
    policy, base = (
        LMDistribution(plain_model(task.model), task.tokenizer, freeze=frozen, length=settings.max_completion_length)
        for frozen in (False, True)
    )

    def check(sample: Any, context: str) -> torch.Tensor:
        return torch.tensor(task.verdicts([number_of[context]], [sample.text])[0] > 0)

    tuner = CDPGTuner(
        policy, base * BooleanScorer(check), context_dataset=[row["prompt"] for row in rows], track_metrics=["kl"],
        learning_rate=settings.learning_rate, warmup_steps=0, n_gradient_steps=10**6,
        n_samples_per_context=settings.num_generations, n_contexts_per_step=settings.contexts_per_epoch,
        sampling_size=settings.num_generations, scoring_size=64, validate_on_start=False,
    )  # fmt: skip

    class Over(Exception):
        """The time is up: the tuner has no other way to end."""

    def begun(number: int) -> None:
        if number and clock.step(lambda folder: task.save(policy.model, folder)):
            raise Over
        if not number:
            clock.begin()

    tuner.step_idx_updated.enroll(begun)
    try:
        tuner.tune()
    except Over:
        return


if __name__ == "__main__":
    main()
