"""The cost model of an epoch beside measurements, and tables of what it says of larger models.

    python benchmarks/cost.py check [--processes 1,2,4]     # on CPUs, with models that fit
    python benchmarks/cost.py table                         # extrapolated: nothing of it was run

For each number of processes, ``check`` first measures what a process does beside the others (rates and fixed times, on
one workload) and what they send, and then whole epochs of three workloads, in processor time of the busiest process. So
the figures hold on a busy machine; the time by the clock is the same if every process has a core of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cost_model import FLOAT, Device, Model, Work, engine_devices, engine_epoch, epoch, memory
from forked import forked
from memory import make_model

CALIBRATION = {"layers": 6, "width": 384, "vocabulary": 4000}
LENGTH = 32
"""Tokens of a completion in the calibration."""
CHECKED: tuple[dict[str, Any], ...] = (
    {"contexts": 8, "samples": 16, "prompt": 16, "completion": 32, "satisfying": 0.5},
    {"contexts": 8, "samples": 16, "prompt": 64, "completion": 16, "satisfying": 0.125},
    {"contexts": 4, "samples": 16, "prompt": 16, "completion": 32, "satisfying": 1.0, "width": 512},
)
"""Workloads; the last has a larger model than the one that the rates are measured with."""
SMALLEST = {"contexts": 4, "samples": 2, "prompt": 16, "completion": 2, "satisfying": 0.5}
"""An epoch with little work for the model, for the time of all else."""
REPEATS = 4
TOKENS_PER_PASS = 1280
MODELS = (
    Model("135M", 30, 576, 1536, 192, 49152),
    Model("1B", 16, 2048, 8192, 512, 128256),
    Model("8B", 32, 4096, 14336, 1024, 128256, tied=False),
    Model("70B", 80, 8192, 28672, 1024, 128256, tied=False),
)
GPU = Device(
    sampling=300e12, scoring=400e12, gradient=400e12, memory_rate=2e12, step_seconds=60e-6, pass_seconds=200e-6,
    network=40e9, gathering=40e9, latency=30e-6, cache_rate=2e12, memory=80e9,
)  # fmt: skip
"""Assumed, not measured: a GPU with 80 GB, about 40 % of 989 TFLOP/s (bfloat16) and 60 % of 3.35 TB/s, and 400 Gbit/s
between machines."""
INSIDE = 300e9
"""Assumed bytes/s between the GPUs of one machine, which has eight."""
PRODUCTION = Work(64, 64, 256, 256, 0.2, rows_per_pass=512, tokens_per_pass=8192, recomputes=True)


def shape(width: int, layers: int, vocabulary: int) -> Model:
    """The models of ``benchmarks/memory.py``."""
    return Model(f"{width} × {layers}", layers, width, 8 * width // 3, width, vocabulary)


def seconds_of(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Processor seconds, the least of some repetitions after one to warm up."""
    found = []
    for _ in range(repeats + 1):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return min(found[1:])


# --- children ---


def calibrate(folder: Path, sharding: str) -> None:
    """What the first process does, beside others that do the same."""
    import torch

    from cdpg import CDPGConfig
    from cdpg.contexts.contexts import Context
    from cdpg.models.loading import load_for
    from cdpg.models.rng import UniformStream
    from cdpg.models.sampling import Samples, draw_samples
    from cdpg.models.scoring import plan_passes, prompts_and_rows, score_samples
    from cdpg.models.sharding import repeated_blocks
    from cdpg.system.distributed import Processes, make_accelerator

    config = CDPGConfig(
        device="cpu", max_completion_length=LENGTH, tokens_per_pass=TOKENS_PER_PASS, sharding=sharding,
        output_dir=str(folder),
    )  # fmt: skip
    processes = Processes(make_accelerator(config))
    model, _, divide = load_for(processes, str(folder / str(CALIBRATION["width"])), config)
    divide()
    made, prompt = shape(**CALIBRATION), 16
    contexts = [Context(" ".join(f"w{n + 2}" for n in range(prompt)), {}, place) for place in range(4)]
    prompts = model.encode(contexts, LENGTH)
    gathering = 0.0
    if sharding == "full":
        gathering = seconds_of(lambda: gather_all(repeated_blocks(model.module)))  # type: ignore[attr-defined]

    def draw(samples: int) -> Samples:
        return draw_samples(model, contexts, prompts, samples, config, UniformStream(0, "check", samples))

    few, full_pass, many = 2, (TOKENS_PER_PASS // 4 - prompt) // LENGTH, 32
    drawn = {samples: draw(samples) for samples in (few, full_pass, many)}
    token, start = made.flops(prompt + LENGTH / 2), 4 * prompt * made.flops(prompt / 2)

    def rate_and_fixed(
        work: Callable[[int], Any], samples: int, times_flops: float, runs: float
    ) -> tuple[float, float]:
        """FLOP/s, and the seconds that do not depend on the number of samples, for each of so many runs."""
        times = {n: seconds_of(partial(work, n)) for n in (few, samples)}
        flops = {n: times_flops * (4 * n * LENGTH * token + start) for n in times}
        rate = (flops[samples] - flops[few]) / (times[samples] - times[few])
        fixed = times[samples] - flops[samples] / rate
        return (rate, fixed / runs) if fixed > 0 else (flops[samples] / times[samples], 0.0)

    def score(samples: int) -> None:
        score_samples(model, drawn[samples], torch.arange(4 * samples), TOKENS_PER_PASS)

    def differentiate(samples: int) -> None:
        passes = plan_passes(drawn[samples], torch.arange(4 * samples), TOKENS_PER_PASS)
        with model.gradient_passes(len(passes)):
            for part in passes:
                model.backward(model.score(*prompts_and_rows(drawn[samples], part)).log_prob().sum())

    sampling, step = rate_and_fixed(draw, many, 1, LENGTH)
    scoring, _ = rate_and_fixed(score, full_pass, 1, 1)
    gradient, fixed = rate_and_fixed(differentiate, full_pass, 3, 1)
    optimiser = torch.optim.Adam(model.module.parameters(), fused=True)  # type: ignore[attr-defined]
    held = made.parameters / (processes.count if sharding == "full" else 1)
    memory_rate = 7 * FLOAT * held / seconds_of(optimiser.step)
    reading = FLOAT * made.parameters / memory_rate
    found = {
        "sampling": sampling, "scoring": scoring, "gradient": gradient, "memory_rate": memory_rate,
        "step_seconds": max(0.0, step - reading - gathering) / made.layers,
        "pass_seconds": max(0.0, fixed - 6 * gathering) / made.layers,
    }  # fmt: skip
    if gathering:
        others = (processes.count - 1) / processes.count
        found["gathering"] = others * FLOAT * made.layers * made.layer / gathering
    if processes.is_main:
        (folder / "rates.json").write_text(json.dumps(found))


def gather_all(layers: list[Any]) -> None:
    """Gather and free each layer of a divided model, as a step of sampling does."""
    for layer in layers:
        layer.unshard()
        layer.reshard()


def measure_network(folder: Path) -> None:
    """What some processes send."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    count = dist.get_world_size()
    parts, small = torch.ones(4 * 2**20 // count), torch.ones(1)
    big = torch.ones(count * parts.numel())
    size, others = FLOAT * big.numel(), (count - 1) / count

    def many_small() -> None:
        for _ in range(100):
            dist.all_reduce(small)

    latency = seconds_of(many_small) / 100
    sums = seconds_of(lambda: dist.all_reduce(big)) - latency
    gathers = seconds_of(lambda: dist.all_gather_into_tensor(big, parts)) - latency
    if dist.get_rank() == 0:
        # Each sends the parts of the others twice for a sum, and once to gather.
        found = {"network": 2 * others * size / sums, "gathering": others * size / gathers, "latency": latency}
        (folder / "network.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def share_of(satisfying: float) -> Callable[..., list[float]]:
    every = round(1 / satisfying)

    def check(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return [float(place % every == 0) for place in range(len(completions))]

    return check


def run(folder: Path, sharding: str, workloads: Sequence[dict[str, Any]]) -> None:
    """Whole epochs of some workloads; every process reports its processor seconds."""
    from transformers import TrainerCallback

    from cdpg import CDPGConfig, CDPGTrainer

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: Any, **parts: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, *args: Any, **parts: Any) -> None:
            self.seconds.append(time.process_time() - self.started)

    found = []
    for given in workloads:
        config = CDPGConfig(
            output_dir=str(folder / "run"), overwrite_output_dir=True, epochs=REPEATS + 1, warmup_epochs=0,
            device="cpu", contexts_per_epoch=given["contexts"], num_generations=given["samples"], replay=0,
            control_variate=False, max_completion_length=given["completion"], check_workers=0, evaluate_every=0,
            evaluate_at_end=False, save_every=1000, keep="last", sharding=sharding,
        )  # fmt: skip
        data = [{"prompt": " ".join(f"w{n + place}" for n in range(given["prompt"]))} for place in range(2, 18)]
        clock = Clock()
        source = str(folder / str(given.get("width", CALIBRATION["width"])))
        CDPGTrainer(source, share_of(given["satisfying"]), config, data, callbacks=[clock]).train()
        found.append(min(clock.seconds[1:]))
    (folder / f"seconds-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


# --- this process ---


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def check(counts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for width in {CALIBRATION["width"], *(given.get("width", CALIBRATION["width"]) for given in CHECKED)}:
            shaped = (folder / str(width), width, CALIBRATION["layers"], CALIBRATION["vocabulary"])
            forked(partial(make_model, *shaped))
        print("| workload | sharding | processes | forecast, s | measured, s | ratio |")
        print("| --- | --- | --- | --- | --- | --- |")
        for count, sharding in ways(counts):
            device = measured_device(folder, count, sharding)
            forked(partial(run, folder, sharding, CHECKED), processes=count)
            seconds = [read(folder / f"seconds-{rank}.json") for rank in range(count)]
            for number, facts in enumerate(CHECKED):
                model = shape(**{**CALIBRATION, "width": facts.get("width", CALIBRATION["width"])})
                work = Work(**{name: value for name, value in facts.items() if name != "width"})
                found = max(of_rank[number] for of_rank in seconds)
                expected = epoch(model, work, device, count, sharding == "full").total
                label = f"{model.name}, N {work.contexts}, M {work.samples}, prompt {work.prompt}, completion "
                label += f"{work.completion:.0f}, satisfying {work.satisfying}"
                print(f"| {label} | {sharding} | {count} | {expected:.2f} | {found:.2f} | {expected / found:.2f} |")
                sys.stdout.flush()


def measured_device(folder: Path, count: int, sharding: str) -> Device:
    """One of so many processes side by side. What a lone process sends is never asked for."""
    forked(partial(measure_network, folder), processes=max(2, count))
    forked(partial(calibrate, folder, sharding), processes=count)
    rates = read(folder / "network.json") | read(folder / "rates.json")
    without = Device(**rates)
    forked(partial(run, folder, sharding, (SMALLEST,)), processes=count)
    found = max(read(folder / f"seconds-{rank}.json")[0] for rank in range(count))
    rest = found - epoch(shape(**CALIBRATION), Work(**SMALLEST), without, count, sharding == "full").total
    rates["epoch_seconds"] = max(0.0, rest)
    shown = ", ".join(f"{name} {value:.3g}" for name, value in rates.items())
    print(f"{count} processes: {shown}", file=sys.stderr, flush=True)
    return Device(**rates)


def ways(counts: list[int]) -> Iterator[tuple[int, str]]:
    for count in counts:
        yield count, "none"
        if count > 1:
            yield count, "full"


def table() -> None:
    """What the formulas say of GPUs: an extrapolation."""
    print("| model | GPUs | sharding | memory of each | own sampler, s | longest | engine, s | longest |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in MODELS:
        for devices in (1, 2, 4, 8, 16, 32, 64):
            print(row(model, devices))


def row(model: Model, devices: int) -> str:
    device = GPU if devices > 8 else Device(**{**vars(GPU), "network": INSIDE, "gathering": INSIDE})
    way = next((d for d in (False, True) if memory(model, PRODUCTION, devices, d) < device.memory), None)
    if way is None:
        needed = memory(model, PRODUCTION, devices, True)
        return f"| {model.name} | {devices} | does not fit | {needed / 1e9:.0f} GB | | | | |"
    own = epoch(model, PRODUCTION, device, devices, way)
    held = memory(model, PRODUCTION, devices, way)
    cells = [model.name, str(devices), "full" if way else "none", f"{held / 1e9:.0f} GB", f"{own.total:.1f}"]
    cells.append(own.bottleneck)
    best = best_engine(model, device, devices)
    cells += ["", ""] if best is None else [f"{best[0].total:.1f} ({best[1]} sample)", best[0].bottleneck]
    return "| " + " | ".join(cells) + " |"


def best_engine(model: Model, device: Device, devices: int) -> Any:
    """The quickest division of the devices into those that train and those that sample."""
    found = []
    servers = engine_devices(model, device)
    while servers < devices:
        left = devices - servers
        way = next((d for d in (False, True) if memory(model, PRODUCTION, left, d) < device.memory), None)
        if way is not None:
            found.append((engine_epoch(model, PRODUCTION, device, left, way, servers), servers))
        servers *= 2
    return min(found, key=lambda pair: pair[0].total, default=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["check", "table"])
    parser.add_argument("--processes", default="1,2,4")
    options = parser.parse_args()
    if options.part == "check":
        check([int(count) for count in options.processes.split(",")])
    else:
        table()


if __name__ == "__main__":
    main()
