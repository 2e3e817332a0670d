"""Time and memory of an epoch, by formulas: from the model, N, M, lengths, devices, bandwidth and satisfying share.

docs/cost.md explains them. ``benchmarks/cost.py`` compares them with measurements and prints tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOAT = 4
"""Bytes of a weight in training."""
SERVED = 2
"""Bytes of a weight in an engine (bfloat16)."""
ADAM_TRAFFIC = 7 * FLOAT
"""Bytes that Adam's step reads and writes for each weight."""
LAYER_ACTIVATIONS = 24
"""Numbers that a layer keeps for the gradient, for each token, in units of its width."""


@dataclass(frozen=True)
class Model:
    """A decoder-only model."""

    name: str
    layers: int
    width: int
    inner: int
    """Width within the feed-forward part."""
    keys: int
    """Width of a token's keys in a layer."""
    vocabulary: int
    tied: bool = True

    @property
    def layer(self) -> int:
        return self.width * (2 * self.width + 2 * self.keys) + 3 * self.width * self.inner

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.vocabulary * self.width * (1 if self.tied else 2)

    def flops(self, context: float) -> float:
        """Of one token that follows ``context`` others, without a gradient."""
        return 2 * (self.layers * self.layer + self.vocabulary * self.width) + 4 * self.layers * self.width * context

    @property
    def cache(self) -> int:
        """Numbers in the keys and values of one token."""
        return 2 * self.layers * self.keys


@dataclass(frozen=True)
class Work:
    """An epoch."""

    contexts: int
    samples: int
    prompt: int
    completion: float
    """Mean length; rows that finish make room for rows that wait."""
    satisfying: float
    rows_per_pass: int = 256
    tokens_per_pass: int = 1280
    replay: int = 0
    """Replayed steps, each on a quarter of the contexts."""
    recomputes: bool = False


@dataclass(frozen=True)
class Device:
    """What one device does; rates are those that are reached, not those of a data sheet."""

    sampling: float
    """FLOP/s of a step of sampling, beside its fixed time."""
    scoring: float
    gradient: float
    memory_rate: float
    """Bytes/s read from memory; every step of sampling reads the weights."""
    step_seconds: float
    """Fixed time of one layer's part in a step of sampling."""
    pass_seconds: float
    """Fixed time of one layer's part in a pass, the gradient included."""
    network: float
    """Bytes/s that a device sends and receives, when gradients are summed or weights are sent."""
    gathering: float
    """The same, when the weights of a divided model are gathered."""
    latency: float
    """Seconds of a collective operation, beside its bytes."""
    cache_rate: float = math.inf
    """Bytes/s at which keys and values are read; on CPUs they are a part of the measured rate of sampling."""
    memory: float = math.inf
    epoch_seconds: float = 0.0
    """What an epoch takes beside the model: to prepare and check samples, and to write files."""


@dataclass(frozen=True)
class Cost:
    """Seconds of an epoch on every device, by stage."""

    sampling: float
    base: float
    gradient: float
    optimiser: float
    gathering: float
    """Weights of a divided model, while sampling."""
    exchange: float
    """Gradients, and weights of a divided model while it is scored and differentiated."""
    sending: float = 0.0
    """Weights to an engine."""
    rest: float = 0.0
    """What does not depend on the model."""

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    @property
    def bottleneck(self) -> str:
        return max(vars(self), key=lambda stage: getattr(self, stage))


def epoch(model: Model, work: Work, device: Device, devices: int, divided: bool) -> Cost:
    """The cost of an epoch whose samples are drawn by the program itself."""
    contexts = work.contexts / devices
    rows = contexts * work.samples
    others = (devices - 1) / devices
    gather = others * FLOAT * model.parameters / device.gathering + model.layers * device.latency
    gather = gather if divided and devices > 1 else 0.0
    prompts = contexts * work.prompt * model.flops(work.prompt / 2)
    passes = math.ceil(rows / work.rows_per_pass)
    steps = passes * work.completion
    token = model.flops(work.prompt + work.completion / 2)
    reading = FLOAT * model.parameters / device.memory_rate + model.layers * device.step_seconds
    keys = rows * work.completion * FLOAT * model.cache * (work.prompt + work.completion / 2) / device.cache_rate
    scored = work.satisfying * rows
    tokens = scored * work.completion + contexts * work.prompt
    work_flops = scored * work.completion * token + prompts
    scoring_passes = max(1, math.ceil(tokens / work.tokens_per_pass))
    again = 1 + work.replay / 4
    backward = (4 if work.recomputes else 3) / 3
    gradient_passes = scoring_passes * again
    steps_taken = 1 + work.replay
    sums = 2 * others * FLOAT * model.parameters / device.network + device.latency if devices > 1 else 0.0
    return Cost(
        sampling=rows * work.completion * token / device.sampling + prompts / device.scoring + steps * reading + keys,
        base=work_flops / device.scoring + scoring_passes * model.layers * device.pass_seconds / 3,
        gradient=again * backward * 3 * work_flops / device.gradient
        + gradient_passes * model.layers * device.pass_seconds,
        optimiser=steps_taken * ADAM_TRAFFIC * model.parameters / device.memory_rate / (devices if divided else 1),
        gathering=(steps + passes) * gather,
        exchange=scoring_passes * gather + gradient_passes * 6 * gather if gather else steps_taken * sums,
        rest=device.epoch_seconds,
    )


def engine_epoch(model: Model, work: Work, device: Device, devices: int, divided: bool, servers: int) -> Cost:
    """The same with an engine on ``servers`` devices of its own, which has the weights in bfloat16.

    If a device cannot hold the weights, the engine divides each product among as many devices as can.
    """
    own = epoch(model, work, device, devices, divided)
    each = engine_devices(model, device)
    replicas = max(1, servers // each)
    rows = work.contexts * work.samples / replicas
    passes = math.ceil(rows / work.rows_per_pass)
    token = model.flops(work.prompt + work.completion / 2)
    reading = SERVED * model.parameters / device.memory_rate / each
    joining = 0.0 if each == 1 else 2 * model.layers * device.latency
    fixed = passes * work.completion * (reading + model.layers * device.step_seconds + joining)
    prompts = work.contexts / replicas * work.prompt * model.flops(work.prompt / 2)
    keys = rows * work.completion * SERVED * model.cache * (work.prompt + work.completion / 2) / device.cache_rate
    computing = (rows * work.completion * token / device.sampling + prompts / device.scoring + keys) / each
    send = SERVED * model.parameters / device.network
    return Cost(fixed + computing, own.base, own.gradient, own.optimiser, 0.0, own.exchange, send, own.rest)


def engine_devices(model: Model, device: Device) -> int:
    """Devices that hold one copy of an engine's weights, with a third of their memory left for its cache."""
    return 2 ** math.ceil(math.log2(max(1.0, SERVED * model.parameters / (device.memory * 2 / 3))))


def memory(model: Model, work: Work, devices: int, divided: bool, keeps_best: bool = False) -> float:
    """Bytes on each GPU at the peak of an epoch."""
    each = devices if divided else 1
    copies = 2 if keeps_best and each > 1 else 0  # those of a model that is not divided are in the machine's memory
    stays = (5 + copies) * FLOAT * model.parameters / each
    outside = model.vocabulary * model.width * (1 if model.tied else 2)  # whole, and so is its gradient
    whole = FLOAT * 2 * (model.layer + outside) if each > 1 else 0.0
    rows = min(work.rows_per_pass, work.contexts * work.samples / devices)
    prompts = model.cache * work.prompt * work.contexts / devices
    sampling = FLOAT * (rows * (model.cache * work.completion + 3 * model.vocabulary) + prompts)
    held = (1 if work.recomputes else LAYER_ACTIVATIONS) * model.layers * model.width
    logits = min(3 * work.tokens_per_pass * model.vocabulary, 3 * 2**26)
    gradient = FLOAT * (work.tokens_per_pass * held + logits)
    return stays + whole + max(sampling, gradient)
