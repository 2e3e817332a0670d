"""Times one epoch of cdpg stage by stage, beside the machine's own speed, ``generate``, and steps of GRPO and disco.

    python benchmarks/epoch.py --model FOLDER_OR_HUB_ID [--only sampling,epoch,grpo,memory] [--output FILE.json]
    python benchmarks/epoch.py --model FOLDER_OR_HUB_ID --only disco --disco CHECKOUT

Machines are noisy, so only ratios within one run are meaningful. The sides of a comparison take turns: each is in its
own process, or both in one, and waits while the other works. This process itself loads nothing: on Linux a child's peak
memory starts at that of its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

PARTS = ("sampling", "epoch", "grpo", "disco", "memory")
STAGES = ("sampling", "constraint", "base", "gradient", "optimiser")
RIVALS = {"GRPO": "grpo", "disco": "disco"}
LEARNING_RATE = 1e-5
GEMM_SIZE = 2048
SAMPLES_LARGE = 64
"""M of the larger of the two batches that are sampled."""

HEADER = '"""Helpers for lists, text and files."""\n\nimport os\nimport re\n\n\n'
CONSTANTS = 'WORD = re.compile(r"[A-Za-z]+")\nDEFAULT_ENCODING = "utf-8"\n\n\n'
CONTEXTS = (
    (HEADER, "def mean(values):"),
    (HEADER, "def read_lines(path, encoding=None, strip=True):"),
    (HEADER + CONSTANTS, "def count_words(text, ignore_case=True):"),
    (HEADER + CONSTANTS, "def split_into_chunks(items, size, drop_last=False):"),
)
"""What stands above each function, and its signature: no line break after it, as a tokenizer would merge it."""

Record = dict[str, Any]


def say(text: str = "") -> None:
    print(text, flush=True)


def rows() -> list[Record]:
    """The contexts as both trainers take them: a prompt, and the signature for the constraint."""
    return [{"prompt": above + signature, "signature": signature} for above, signature in CONTEXTS]


# What runs in a child process.


class Link:
    """The child's end: a line of JSON in for each turn, a line of JSON out when it is done."""

    def __init__(self, processor_time: bool) -> None:
        self.now = time.process_time if processor_time else time.perf_counter
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever libraries print goes to the log

    def receive(self) -> Record:
        line = sys.stdin.readline()
        if not line:
            raise SystemExit  # the parent is gone
        request: Record = json.loads(line)
        return request

    def send(self, answer: Record) -> None:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        self._out.write(json.dumps({**answer, "peak_bytes": peak}) + "\n")
        self._out.flush()


def turns(link: Link, answer: Callable[[float], Record]) -> Any:
    """A callback for either trainer: waits before each step, and reports the time from there to its end."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):  # type: ignore[misc]
        since = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            link.send({})
            self._wait()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            link.send(answer(link.now() - self.since))
            self._wait()

        def _wait(self) -> None:
            link.receive()
            self.since = link.now()

    return Turns()


def serve_gemm(spec: Record, link: Link) -> None:
    """The best rate of a few large square products in float32, in FLOP a second."""
    import torch

    left, right = torch.randn(2, GEMM_SIZE, GEMM_SIZE).unbind()
    left @ right
    versions = {name: version(name) for name in ("torch", "transformers", "trl") if find_spec(name)}
    link.send({"threads": torch.get_num_threads(), "versions": versions})
    while link.receive():
        best = float("inf")
        for _ in range(5):
            since = link.now()
            left @ right
            best = min(best, link.now() - since)
        link.send({"flops": 2 * GEMM_SIZE**3 / best})


def serve_sampling(spec: Record, link: Link) -> None:
    """Samples the same batch by cdpg or by ``generate``, as asked, no row ending before the limit."""
    import torch
    from transformers import GenerationConfig

    from cdpg import CDPGConfig
    from cdpg.contexts.contexts import load_contexts
    from cdpg.models.loading import load_model
    from cdpg.models.rng import UniformStream
    from cdpg.models.sampling import sample_chunks
    from cdpg.models.state import pad

    config = CDPGConfig(device="cpu", max_completion_length=spec["tokens"])
    model = load_model(spec["model"], config)
    model.end_ids = frozenset()
    module: Any = model.module
    module.generation_config = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0)
    prompts = model.encode(load_contexts(rows()), spec["tokens"])
    ids, mask = pad(prompts, left=True, device=model.device)

    def by_cdpg(samples: int) -> int:
        stream = UniformStream(0, "benchmark", samples)
        chunks = sample_chunks(model, prompts, samples, spec["tokens"], stream, len(prompts) * samples)
        return sum(len(tokens) for chunk in chunks for tokens in chunk.tokens)

    def by_generate(samples: int) -> int:
        output = module.generate(
            input_ids=ids, attention_mask=mask, num_return_sequences=samples, max_new_tokens=spec["tokens"]
        )
        return int(output[:, ids.shape[1] :].numel())

    ways = {"cdpg": by_cdpg, "generate": by_generate}
    link.send({"parameters": sum(parameter.numel() for parameter in module.parameters())})
    while request := link.receive():
        since = link.now()
        with torch.inference_mode():
            tokens = ways[request["way"]](request["samples"])
        link.send({"seconds": link.now() - since, "tokens": tokens})


def check_of(spec: Record) -> Callable[..., Sequence[bool]]:
    """The constraint, which is the rivals' reward or scorer, too."""
    from rare import documented

    from cdpg.tasks.code.constraint import compiles

    return documented if spec["rare"] else compiles


def serve_cdpg(spec: Record, link: Link) -> None:
    """An epoch of the real trainer each turn."""
    from cdpg import CDPGConfig, CDPGTrainer
    from cdpg.rollout.sampler import Stopwatch
    from cdpg.tasks.code.constraint import FunctionEnd

    folder = Path(spec["folder"]) / "cdpg"
    config = CDPGConfig(
        output_dir=str(folder),
        epochs=10**6,
        contexts_per_epoch=len(CONTEXTS),
        num_generations=spec["samples"],
        max_completion_length=spec["tokens"],
        learning_rate=LEARNING_RATE,
        warmup_epochs=0,
        save_every=10**6,
        prune=not spec["unpruned"],
        device="cpu",
    )
    optimiser: list[float] = []

    def answer(seconds: float) -> Record:
        record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        stages = {f"seconds_{stage}": record.get(f"seconds_{stage}", 0.0) for stage in STAGES}
        stages["seconds_optimiser"] = sum(optimiser)
        stages["seconds_gradient"] -= sum(optimiser)
        optimiser.clear()
        figures = {key: record[key] for key in ("satisfaction", "tokens")}
        return {"seconds": seconds, "stages": stages, "optimiser": type(trainer.optimizer).__name__, **figures}

    stop = FunctionEnd() if spec["stop"] else None
    callbacks = [turns(link, answer)]
    Stopwatch.__init__.__defaults__ = (link.now,)  # the stages' clock is that of the whole
    trainer = CDPGTrainer(spec["model"], check_of(spec), config, rows(), callbacks=callbacks, stop=stop)
    step = trainer.optimizer.step

    def timed_step() -> None:
        since = link.now()
        step()
        optimiser.append(link.now() - since)

    trainer.optimizer.step = timed_step  # type: ignore[method-assign, assignment]
    trainer.train()


def serve_grpo(spec: Record, link: Link) -> None:
    """A step of TRL's GRPO each turn, on the same contexts, samples, length and reward; it has no stopping rule."""
    from datasets import Dataset
    from grpo import grpo_config
    from trl import GRPOTrainer

    check = check_of(spec)
    completions = len(CONTEXTS) * spec["samples"]
    config = grpo_config(
        str(Path(spec["folder"]) / "grpo"), spec["samples"], completions, spec["grpo_batch"],
        beta=0.04, max_completion_length=spec["tokens"], learning_rate=LEARNING_RATE,
    )  # fmt: skip
    seen: list[tuple[bool, int]] = []

    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        verdicts = check(prompts, completions, **columns)
        seen.extend(zip(verdicts, map(len, columns["completion_ids"]), strict=True))
        return [float(verdict) for verdict in verdicts]

    def answer(seconds: float) -> Record:
        if len(seen) != completions:
            raise RuntimeError(f"a step of GRPO generated {len(seen)} completions, {completions} were expected")
        share, tokens = sum(verdict for verdict, _ in seen) / len(seen), sum(length for _, length in seen)
        seen.clear()
        return {"seconds": seconds, "satisfaction": share, "tokens": tokens, "optimiser": config.optim, "stages": {}}

    dataset, callbacks = Dataset.from_list(rows()), [turns(link, answer)]
    GRPOTrainer(plain_model(spec["model"]), reward, args=config, train_dataset=dataset, callbacks=callbacks).train()


def serve_disco(spec: Record, link: Link) -> None:
    """A step of disco's conditional tuner each turn, on the same contexts, samples and length, with the same check."""
    import torch
    from transformers import AutoTokenizer

    sys.path.insert(0, spec["disco"])
    from disco.distributions import LMDistribution
    from disco.scorers import BooleanScorer
    from disco.tuners import CDPGTuner

    check, signature = check_of(spec), {row["prompt"]: row["signature"] for row in rows()}
    tokenizer, seen = AutoTokenizer.from_pretrained(spec["model"]), list[tuple[bool, int]]()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    policy, base = (
        LMDistribution(plain_model(spec["model"]), tokenizer, freeze=frozen, length=spec["tokens"])
        for frozen in (False, True)
    )

    def satisfies(sample: Any, context: str) -> torch.Tensor:
        found = bool(check([context], [sample.text], signature=[signature[context]])[0])
        seen.append((found, len(sample.token_ids)))
        return torch.tensor(found)

    completions = len(CONTEXTS) * spec["samples"]
    tuner = CDPGTuner(
        policy, base * BooleanScorer(satisfies), context_dataset=list(signature), track_metrics=["kl"],
        learning_rate=LEARNING_RATE, warmup_steps=0, n_gradient_steps=10**6, n_samples_per_context=spec["samples"],
        n_contexts_per_step=len(CONTEXTS), sampling_size=spec["samples"], scoring_size=spec["grpo_batch"],
        validate_on_start=False,
    )  # fmt: skip
    since = 0.0

    def begun(number: int) -> None:
        nonlocal since
        if number:
            seconds = link.now() - since
            judged, tokens = seen[:completions], sum(length for _, length in seen[:completions])
            share = sum(found for found, _ in judged) / completions
            seen.clear()
            link.send({"seconds": seconds, "satisfaction": share, "tokens": tokens, "optimiser": "Adam", "stages": {}})
        else:
            link.send({})
        link.receive()
        since = link.now()

    tuner.step_idx_updated.enroll(begun)
    tuner.tune()


def plain_model(name: str) -> Any:
    """In float32; a folder whose weights once were quantised may still say so, and the trainer would refuse it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(name)
    vars(config).pop("quantization_config", None)
    return AutoModelForCausalLM.from_pretrained(name, config=config, dtype="float32")


def serve(spec: Record) -> None:
    """The whole life of a child process."""
    link = Link(spec["processor_time"])
    import torch

    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    services: dict[str, Callable[[Record, Link], None]] = {
        "gemm": serve_gemm, "sampling": serve_sampling, "cdpg": serve_cdpg, "grpo": serve_grpo, "disco": serve_disco,
    }  # fmt: skip
    services[spec["service"]](spec, link)


# What runs in this process.


class Worker:
    """The parent's end of a child process, as a context manager."""

    def __init__(self, options: argparse.Namespace, service: str, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cdpg-benchmark-")
        self._log = Path(self._folder.name) / "log.txt"
        self._name = f"{service} {settings or ''}"
        spec = vars(options) | settings | {"service": service, "folder": self._folder.name}
        command = [sys.executable, __file__, "--serve", json.dumps(spec, default=str)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log.open("w"), text=True)
        self.greeting = self._answer()

    def turn(self, **request: Any) -> Record:
        """Let the child work once, and wait for it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the child has ended; that there is no answer says so
            self._process.stdin.write(json.dumps({"go": True, **request}) + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        if "seconds" in answer:  # a run is long: say how it goes
            print(f"{self._name} {request or ''}: {answer['seconds']:.2f} s", file=sys.stderr, flush=True)
        return answer

    def _answer(self) -> Record:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            status = self._process.wait()
            raise SystemExit(f"a child process ended with status {status}:\n{self._log.read_text()[-3000:]}")
        answer: Record = json.loads(text)
        return answer

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # it waits for a turn, and what it would do at its end is of no interest
        self._process.wait()
        self._folder.cleanup()


def measure_sampling(options: argparse.Namespace, gemm: Callable[[], None]) -> Record:
    """cdpg with two sizes of batch and, in turns with it in the same process, ``generate`` with the smaller."""
    results: Record = {"batches": {}}
    with Worker(options, "sampling") as worker:
        results["parameters"] = worker.greeting["parameters"]
        for samples, ways in ((options.samples, ("cdpg", "generate")), (SAMPLES_LARGE, ("cdpg",))):
            times: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(options.repeats + 1):
                gemm()
                answers = {way: worker.turn(way=way, samples=samples) for way in ways}
                for way, answer in answers.items() if turn else ():
                    times[way].append(answer["seconds"])
            if len({answer["tokens"] for answer in answers.values()}) > 1:
                raise SystemExit(f"not the same number of tokens was sampled: {answers}")
            tokens, seconds = answers["cdpg"]["tokens"], median(times["cdpg"])
            results["batches"][str(len(CONTEXTS) * samples)] = {
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "flops": 2 * results["parameters"] * tokens / seconds,
                "all_seconds": times,
                **({"seconds_generate": median(times["generate"])} if "generate" in times else {}),
            }
    for batch in results["batches"].values():
        if "seconds_generate" in batch:
            batch["ratio"] = batch["seconds_generate"] / batch["seconds"]
    return results


def measure_steps(options: argparse.Namespace, gemm: Callable[[], None]) -> Record:
    """Epochs of cdpg, with and without the stopping rule, and steps of the rivals, in turns after a warm-up of each."""
    with ExitStack() as stack:
        kinds = {
            "cdpg": stack.enter_context(Worker(options, "cdpg", stop=False)),
            "cdpg, stopping": stack.enter_context(Worker(options, "cdpg", stop=True)),
        }
        for rival, service in RIVALS.items():
            if service in options.only:
                kinds[rival] = stack.enter_context(Worker(options, service))
        rounds = []
        for _ in range(options.repeats + 1):
            gemm()
            rounds.append({kind: worker.turn() for kind, worker in kinds.items()})
    results = {kind: summary([answers[kind] for answers in rounds[1:]]) for kind in kinds}
    for rival, service in RIVALS.items():
        for result in results.values() if rival in results else ():
            result[f"ratio_{service}"] = results[rival]["seconds"] / result["seconds"]
    return results


def summary(steps: list[Record]) -> Record:
    """Medians over steps, and the share of satisfying samples in all of them."""
    return {
        "seconds": median(step["seconds"] for step in steps),
        "tokens": median(step["tokens"] for step in steps),
        "tokens_per_second": median(step["tokens"] / step["seconds"] for step in steps),
        "satisfaction": sum(step["satisfaction"] for step in steps) / len(steps),
        "megabytes": steps[-1]["peak_bytes"] / 1e6,
        "optimiser": steps[0]["optimiser"],
        "all_seconds": [step["seconds"] for step in steps],
        **{stage: median(step["stages"][stage] for step in steps) for stage in steps[0]["stages"]},
    }


def measure_memory(options: argparse.Namespace) -> Record:
    """Peak memory of a fresh process after two epochs: only the second has the optimiser's moments from its start."""
    results: Record = {}
    for samples in (options.samples, options.memory_samples):
        with Worker(options, "cdpg", samples=samples, stop=False) as worker:
            peak = [worker.turn() for _ in range(2)][-1]["peak_bytes"]
        results[f"M={samples}"] = {"megabytes": peak / 1e6}
    first, last = results.values()
    last["ratio"] = last["megabytes"] / first["megabytes"]
    return results


# The table.


def table(title: str, columns: Record, lines: Sequence[tuple[str, str, str]]) -> None:
    """A line for each name, key and format; a column that lacks the key stays empty."""
    say(f"\n{title}\n{'':<30}" + "".join(f"{name:>18}" for name in columns))
    for name, key, form in lines:
        cells = (format(column[key], form) if key in column else "" for column in columns.values())
        say(f"  {name:<28}" + "".join(f"{cell:>18}" for cell in cells))


def tell(results: Record, options: argparse.Namespace) -> None:
    machine = results["machine"]
    names = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    say(f"{options.model}: N={len(CONTEXTS)}, M={options.samples}, {options.tokens} tokens, float32; {names}")
    rates = f"{machine['gemm_flops'] / 1e9:.1f} GFLOP/s at best, {machine['gemm_flops_median'] / 1e9:.1f} in the median"
    say(f"products of {GEMM_SIZE} × {GEMM_SIZE} float32 matrices, {machine['threads']} threads: {rates}")
    if "sampling" in results:
        batches = results["sampling"]["batches"]
        table("Sampling alone, rows side by side, none ending early", batches, SAMPLING_LINES)
    if "steps" in results:
        table("One epoch, or one step of a rival", results["steps"], STEP_LINES)
        if "GRPO" in results["steps"]:
            say(f"  GRPO steps by {results['steps']['GRPO']['optimiser']}, and knows no stopping rule:")
            say("  the same step of GRPO is compared with both.")
    if "memory" in results:
        table("Peak memory of a run", results["memory"], MEMORY_LINES)


SAMPLING_LINES = (
    ("seconds", "seconds", ".2f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("of the GEMM rate", "share", ".1%"),
    ("seconds, generate", "seconds_generate", ".2f"),
    ("times faster than generate", "ratio", ".2f"),
)
STEP_LINES = (
    *((f"{stage}, s", f"seconds_{stage}", ".2f") for stage in STAGES),
    ("whole, s", "seconds", ".2f"),
    ("tokens", "tokens", ".0f"),
    ("tokens/s", "tokens_per_second", ".0f"),
    ("satisfying share", "satisfaction", ".1%"),
    ("peak memory, MB", "megabytes", ".0f"),
    ("times faster than GRPO", "ratio_grpo", ".2f"),
    ("times faster than disco", "ratio_disco", ".2f"),
)
MEMORY_LINES = (("peak memory, MB", "megabytes", ".0f"), ("ratio", "ratio", ".3f"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub id")
    usual = ",".join(part for part in PARTS if part != "disco")
    parser.add_argument("--only", default=usual, help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--threads", type=int, help="threads of arithmetic; PyTorch's own choice by default")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count, after one to warm up")
    parser.add_argument("--samples", type=int, default=16, help="M")
    parser.add_argument("--tokens", type=int, default=48, help="length of a completion")
    parser.add_argument("--memory-samples", type=int, default=256, help="M of the larger run in memory")
    parser.add_argument("--grpo-batch", type=int, help="samples in one pass of GRPO or disco; M by default")
    parser.add_argument("--disco", help="the folder of a checkout of disco, which is not installed")
    parser.add_argument("--rare", action="store_true", help="a constraint that few samples satisfy")
    parser.add_argument("--processor-time", action="store_true", help="not wall time: for a busy machine, one thread")
    parser.add_argument("--unpruned", action="store_true", help="cdpg draws hopeless samples to their end")
    parser.add_argument("--output", type=Path, help="write the figures to this file as JSON")
    options = parser.parse_args()
    options.only = options.only.split(",")
    options.grpo_batch = options.grpo_batch or options.samples
    if len(CONTEXTS) * options.samples % options.grpo_batch:
        parser.error(f"--grpo-batch must divide the {len(CONTEXTS) * options.samples} samples of a step")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"--only takes {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    if "disco" in options.only and not options.disco:
        parser.error("for disco, give the folder of its checkout: --disco FOLDER")
    return options


def main() -> None:
    options = parse()
    results: Record = {"settings": {key: str(value) for key, value in vars(options).items()}}
    with Worker(options, "gemm") as worker:
        rates: list[float] = []

        def gemm() -> None:
            rates.append(worker.turn()["flops"])

        gemm()
        if "sampling" in options.only:
            results["sampling"] = measure_sampling(options, gemm)
        if {"epoch", *RIVALS.values()} & set(options.only):
            results["steps"] = measure_steps(options, gemm)
        if "memory" in options.only:
            results["memory"] = measure_memory(options)
        results["machine"] = {"gemm_flops": max(rates), "gemm_flops_median": median(rates), **worker.greeting}
    for batch in results["sampling"]["batches"].values() if "sampling" in results else ():
        batch["share"] = batch["flops"] / max(rates)
    tell(results, options)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(json.loads(sys.argv[2]))
    else:
        main()
