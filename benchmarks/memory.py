"""Peak memory of runs: with divided weights beside whole ones, and what ``cdpg check`` forecasts beside what is used.

    python benchmarks/memory.py sharding [--width 768] [--layers 12]     # two processes, each way
    python benchmarks/memory.py check [--only 3]                         # five configurations
    python benchmarks/memory.py table                                    # over N·M, lengths, vocabulary, model size
    python benchmarks/memory.py narrow --model FOLDER                    # how far a narrow base_dtype is from float32

Every figure is the high-water mark of a process of its own, forked from this one, which has loaded the libraries and
nothing else. Models are random; their weights do not matter here.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import forked

CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"width": 512, "layers": 6, "vocabulary": 4000, "M": 8, "length": 16, "tokens_per_pass": 512},
    {"width": 512, "layers": 6, "vocabulary": 4000, "M": 64, "length": 16, "tokens_per_pass": 512},
    {"width": 256, "layers": 4, "vocabulary": 32000, "M": 32, "length": 32, "tokens_per_pass": 512},
    {"width": 256, "layers": 8, "vocabulary": 4000, "M": 32, "length": 32, "tokens_per_pass": 1024},
    {
        "width": 256, "layers": 8, "vocabulary": 4000, "M": 32, "length": 32, "tokens_per_pass": 1024,
        "gradient_checkpointing": True,
    },
)  # fmt: skip


MIDDLE: dict[str, Any] = {
    "width": 256, "layers": 6, "vocabulary": 8000, "N": 2, "M": 16, "length": 32, "prompt": 32, "tokens_per_pass": 1280,
}  # fmt: skip
VARIED: dict[str, tuple[dict[str, Any], ...]] = {
    "N·M": ({"M": 64}, {"M": 256}),
    "length of completions": ({"length": 128}, {"length": 256}),
    "length of prompts": ({"prompt": 1024},),
    "vocabulary": ({"vocabulary": 32000}, {"vocabulary": 64000}),
    "model size": ({"width": 128}, {"width": 512}, {"layers": 24}),
    "tokens_per_pass": ({"tokens_per_pass": 320}, {"tokens_per_pass": 5120}),
    "long prompts and completions": tuple(
        {"prompt": 4096, "length": 1024, "M": 4, "width": 128, "layers": 4, "tokens_per_pass": tokens, "epochs": 1}
        for tokens in (1280, 20480)
    ),
}
"""What is changed of :data:`MIDDLE`, one thing at a time."""


def make_model(folder: Path, width: int, layers: int, vocabulary: int) -> None:
    """A random Llama and a tokenizer of numbered words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
        num_attention_heads=width // 64, tie_word_embeddings=True, max_position_embeddings=8192,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def settings(given: dict[str, Any], folder: Path, **others: Any) -> dict[str, Any]:
    values = {
        "output_dir": str(folder / "run"), "overwrite_output_dir": True, "epochs": given.get("epochs", 2),
        "warmup_epochs": 0, "contexts_per_epoch": given.get("N", 2), "num_generations": given["M"],
        "max_completion_length": given["length"],
        "tokens_per_pass": given["tokens_per_pass"], "device": "cpu", "check_workers": 0, "evaluate_every": 0,
        "gradient_checkpointing": given.get("gradient_checkpointing", False),
    }  # fmt: skip
    return {**values, **others}


def every_second(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(place % 2) for place in range(len(completions))]


def prompts_of(given: dict[str, Any]) -> list[dict[str, str]]:
    length = given.get("prompt", 4)
    return [{"prompt": " ".join(f"w{2 + word + place}" for word in range(length))} for place in range(2)]


def run(folder: Path, given: dict[str, Any], sharding: str) -> None:
    """A short run; every process reports its peak. If there is no model yet, it is made: that needs less memory."""
    if not (folder / "config.json").exists():
        make_model(folder, given["width"], given["layers"], given["vocabulary"])
    from cdpg import CDPGConfig, CDPGTrainer
    from cdpg.system import memory

    config = CDPGConfig(**settings(given, folder, sharding=sharding))
    peaks: list[int] = []
    made = CDPGTrainer(str(folder), every_second, config, prompts_of(given))
    made.add_callback(noting(lambda: peaks.append(memory.peak()["memory"])))
    made.train()
    rank = os.environ.get("RANK", "0")
    (folder / f"peak-{rank}.json").write_text(json.dumps(memory.peak()["memory"]))
    (folder / f"trained-{rank}.json").write_text(json.dumps(peaks[-1]))


def noting(note: Callable[[], None]) -> Any:
    """A callback that calls ``note`` after every epoch, before anything is saved."""
    from transformers import TrainerCallback

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **parts: Any) -> None:
            note()

    return Noting()


def forecast(folder: Path, given: dict[str, Any]) -> None:
    """What ``cdpg check`` does before it prints its estimate."""
    import torch

    from cdpg import CDPGConfig
    from cdpg.contexts.contexts import load_contexts
    from cdpg.models.loading import load_model
    from cdpg.models.rng import UniformStream
    from cdpg.models.sampling import draw_samples
    from cdpg.preflight.memory_use import MemoryUse, differentiate_largest_pass, used

    config = CDPGConfig(**settings(given, folder))
    contexts = load_contexts(prompts_of(given))
    start = used(torch.device("cpu"))
    model = load_model(str(folder), config)
    prompts = model.encode(contexts, config.max_completion_length)
    draw_samples(model, contexts, prompts, config.num_generations, config, UniformStream(0, "check", 0))
    sampling = used(model.device)
    differentiate_largest_pass(model, prompts, config)
    use = MemoryUse.of(model, start, sampling, config)
    (folder / "forecast.json").write_text(json.dumps(use.run(config, keeps_best=False)))


def child(folder: Path, given: dict[str, Any], what: str, processes: int = 1) -> None:
    work: Callable[[], None] = {
        "model": lambda: make_model(folder, given["width"], given["layers"], given["vocabulary"]),
        "forecast": lambda: forecast(folder, given),
    }.get(what, lambda: run(folder, given, what))
    forked(work, processes)


def read(path: Path) -> float:
    return float(json.loads(path.read_text()))


def compare_sharding(width: int, layers: int) -> None:
    given = {
        "width": width, "layers": layers, "vocabulary": 8000, "M": 2, "length": 2, "tokens_per_pass": 64,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child(folder, given, "model")
        size = (folder / "model.safetensors").stat().st_size
        print(f"{size / 4e6:.0f} million parameters, 2 processes: peak of each, in MB")
        peaks: dict[str, dict[str, float]] = {"trained": {}, "peak": {}}
        for sharding in ("none", "full"):
            child(folder, given, sharding, processes=2)
            for name, largest in peaks.items():
                found = [read(folder / f"{name}-{rank}.json") for rank in range(2)]
                largest[sharding] = max(found)
                print(f"{sharding}, {name}: {', '.join(f'{peak / 1e6:.0f}' for peak in found)}", flush=True)
    print("ratios of the larger ones, until the last epoch and until the model is saved:")
    print(", ".join(f"{found['full'] / found['none']:.2f}" for found in peaks.values()))


def compare_forecasts(only: int | None) -> None:
    chosen = CONFIGURATIONS if only is None else CONFIGURATIONS[only - 1 : only]
    for given in chosen:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for what in ("model", "forecast", "none"):
                child(folder, given, what)
            size = (folder / "model.safetensors").stat().st_size
            expected, found = read(folder / "forecast.json"), read(folder / "peak-0.json")
        facts = ", ".join(f"{key} {value}" for key, value in given.items())
        print(f"{facts}: {size / 4e6:.0f} million parameters")
        print(f"  forecast {expected / 1e6:.0f} MB, used {found / 1e6:.0f} MB, {expected / found - 1:+.0%}", flush=True)


def print_table() -> None:
    print("| changed | million parameters | peak, MB |")
    print("| --- | --- | --- |")
    print(f"| nothing | {_row(MIDDLE)} |", flush=True)
    for name, changes in VARIED.items():
        for change in changes:
            facts = ", ".join(f"{key} {value:,}" for key, value in change.items())
            print(f"| {name}: {facts} | {_row({**MIDDLE, **change})} |", flush=True)


def _row(given: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        child(folder, given, "none")
        size = (folder / "model.safetensors").stat().st_size
        return f"{size / 4e6:.1f} | {read(folder / 'peak-0.json') / 1e6:,.0f}"


def compare_types(model: str) -> None:
    """The largest difference of a sample's log-probability, of 16 samples of 32 tokens."""
    from cdpg import CDPGConfig
    from cdpg.contexts.contexts import load_contexts
    from cdpg.models.loading import load_policy_and_base
    from cdpg.models.narrow import refuse_large_error

    prompts = ["The sun is", "def add(a, b):", "A recipe for bread:", "Once upon a time"]
    contexts = load_contexts([{"prompt": prompt} for prompt in prompts])
    for dtype in ("bfloat16", "int8"):
        config = CDPGConfig(device="cpu", base_dtype=dtype, base_error=1e9, max_completion_length=32)
        policy, base = load_policy_and_base(model, config)
        found = refuse_large_error(policy, base, contexts, policy.encode(contexts, 32), config)
        size = sum(p.numel() * p.element_size() for p in base.module.parameters())
        print(f"{dtype}: {found:.3g} nats, {size / 1e6:,.0f} MB without scales", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["sharding", "check", "table", "narrow", "child"])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", type=int)
    parser.add_argument("--model")
    for name in ("what", "folder", "given"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "sharding":
        compare_sharding(options.width, options.layers)
    elif options.part == "check":
        compare_forecasts(options.only)
    elif options.part == "table":
        print_table()
    elif options.part == "narrow":
        if options.model is None:
            parser.error("narrow takes --model FOLDER")
        compare_types(options.model)
    else:
        child(Path(options.folder), json.loads(options.given), options.what)


if __name__ == "__main__":
    main()
