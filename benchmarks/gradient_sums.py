"""Processor time to sum a model's gradients over processes: one call for each parameter, and one for each bucket.

    torchrun --nproc_per_node 2 benchmarks/gradient_sums.py [--layers 12] [--width 256] [--repeats 20]

The two ways take turns in one run, so that their ratio is meaningful on a busy machine. Both must give the same bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from accelerate import Accelerator
from torch import nn

from cdpg.system.distributed import Processes


def one_by_one(processes: Processes, parameters: list[nn.Parameter]) -> None:
    """A call for each parameter."""
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad = processes.total(parameter.grad)


def in_buckets(processes: Processes, parameters: list[nn.Parameter]) -> None:
    """What training does."""
    processes.sum_gradients(parameters)


def gpt2_shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """The parameters of a GPT-2 of this size."""
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    processes = Processes(Accelerator(cpu=True))
    torch.manual_seed(processes.accelerator.process_index)
    shapes = gpt2_shapes(options.layers, options.width)
    gradients = [torch.randn(shape) for shape in shapes]
    ways: dict[str, Callable[[Processes, list[nn.Parameter]], None]] = {"one by one": one_by_one, "buckets": in_buckets}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    sums: dict[str, list[torch.Tensor]] = {}
    for repeat in range(options.repeats + 1):
        for name, add in ways.items():
            parameters = [nn.Parameter(torch.empty_like(gradient)) for gradient in gradients]
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            processes.wait()
            started = time.process_time()
            add(processes, parameters)
            if repeat:
                seconds[name].append(time.process_time() - started)
            sums[name] = [p.grad for p in parameters if p.grad is not None]
    same = all(torch.equal(*pair) for pair in zip(*sums.values(), strict=True))
    if processes.is_main:
        count = sum(gradient.numel() for gradient in gradients)
        print(f"{len(shapes)} parameters, {count / 1e6:.1f} million numbers, {processes.count} processes")
        for name, found in seconds.items():
            print(f"{name}: {1000 * median(found):.1f} ms of processor time (median of {len(found)})")
        print(f"the same bits: {same}")
    processes.accelerator.end_training()


if __name__ == "__main__":
    main()
