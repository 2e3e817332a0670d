"""Models whose weights are divided among the processes (FSDP2), and how the processes stay synchronised.

A layer's weights are gathered when the layer runs and freed after it. To gather is a collective operation: all
processes must run the same parts of the model in the same order. They do not have the same number of samples, nor
samples of the same length. So before each run of a part the processes agree on what is run next, and those that have
nothing to do run it on a single token (:class:`Lockstep`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from cdpg.errors import UserError
from cdpg.system.distributed import Processes
from cdpg.system.shards import is_shard, whole

T = TypeVar("T")

_GATHER = "gather_root"
"""The name of a divided model's method that gathers the weights which belong to no layer."""


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The layers of a model: the items of its outermost lists of modules, each list of one type."""
    blocks: list[nn.Module] = []
    for child in module.children():
        items = list(child) if isinstance(child, nn.ModuleList) else []
        alike = len({type(item) for item in items}) == 1
        if alike and all(any(True for _ in item.parameters()) for item in items):
            blocks += items
        else:
            blocks += repeated_blocks(child)
    return blocks


def divide(module: nn.Module, device: torch.device, processes: Processes, dtype: torch.dtype | None = None) -> None:
    """Divide a model's weights among the processes, layer by layer, and move this process's part to the device.

    ``dtype`` is the type to compute in, by default that of the weights. What is in no layer (embeddings, the output
    layer, which may be tied to them) forms one more group.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    if not hasattr(FSDPModule, "reset_iter_state"):
        raise UserError(f"sharding: full needs PyTorch 2.13 or later, and this is {torch.__version__}: install it")
    blocks = repeated_blocks(module)
    if not blocks:
        raise UserError(
            f"sharding: full divides a model layer by layer, and no list of layers was found in a "
            f"{type(module).__name__}: set sharding: none"
        )
    mesh = init_device_mesh(device.type, (processes.count,))
    for part in (*blocks, module):
        sharded: Any = fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        sharded.set_gradient_divide_factor(1.0)  # gradients are summed, not averaged
        sharded.set_force_sum_reduction_for_comms(True)
    # A forward pass of the root that does nothing: it gathers what is in no layer, and makes the layers known to it.
    setattr(module, _GATHER, MethodType(lambda self: None, module))
    register_fsdp_forward_method(module, _GATHER)


def without_weights(module: nn.Module) -> nn.Module:
    """A copy of a model whose parameters hold no numbers; tied ones stay tied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, memo)


def with_weights(blueprint: nn.Module, divided: nn.Module, keep: bool) -> nn.Module | None:
    """A copy of :func:`without_weights` with the whole weights of a divided model, on the CPU; None without ``keep``.

    All processes must take part; those that do not keep the weights free each as soon as it is gathered.
    """
    twin = copy.deepcopy(blueprint) if keep else None
    empty = {} if twin is None else dict(twin.named_parameters())
    found: dict[int, nn.Parameter] = {}
    for name, parameter in divided.named_parameters():
        gathered = whole(parameter.detach())
        if keep:
            found[id(empty[name])] = nn.Parameter(gathered.cpu(), requires_grad=parameter.requires_grad)
    for part in () if twin is None else twin.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, found[id(parameter)])
    return twin


class Lockstep:
    """Lets processes run a divided model different numbers of times."""

    def __init__(self, root: nn.Module, idle: Mapping[str, Callable[[], Any]], processes: Processes) -> None:
        """``idle`` has a short run of each part of the model, by its name; a part is run whole."""
        self._root: Any = root
        self._idle, self._processes = idle, processes
        self._names = list(idle)
        self._in_stage = False
        self._postponed: Sequence[tuple[Tensor, Tensor]] = ()
        self.differentiates = False
        """Whether passes are differentiated: these are alike on all processes, and need no agreement."""

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Context in which each process runs the model as often as it needs; it ends when all have finished.

        Embeddings and the output layer stay gathered until then.
        """
        if self._in_stage:
            yield
            return
        self._in_stage = True
        try:
            yield
            while (chosen := self._agree(None)) is not None:
                self._run_idle(chosen)
            self._free()
        finally:
            self._in_stage = False

    @contextmanager
    def gradient(self, passes: int, idle_pass: Callable[[], Tensor]) -> Iterator[None]:
        """Context for ``passes`` passes with a gradient; ``idle_pass`` is run as often as other processes have more.

        It returns a loss that depends on all weights; its gradient counts nothing.
        """
        counts = torch.zeros(self._processes.count, dtype=torch.long)
        counts[self._processes.accelerator.process_index] = passes
        missing = int(self._processes.total(counts).max()) - passes
        self.differentiates = True
        try:
            yield
            for _ in range(missing):
                self.backward(0.0 * idle_pass())
            self._free()
        finally:
            self.differentiates = False

    def postpone(self, cut: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note where a pass is cut: tensors, each with the copy that the rest of the pass was computed from."""
        self._postponed = cut

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a pass: of what follows the prompts first, then of the prompts.

        A layer runs for both. In one go, its gradient would be complete only after its second run, and divided only
        then: meanwhile the gradients of all layers would be whole.
        """
        loss.backward()
        cut, self._postponed = self._postponed, ()
        if cut:
            getattr(self._root, _GATHER)()  # the first half has freed it
            used = [(tensor, copied.grad) for tensor, copied in cut if copied.grad is not None]
            torch.autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used])

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Run a part of the model, once all processes have agreed to run it."""
        if self.differentiates:
            getattr(self._root, _GATHER)()
            with warnings.catch_warnings():
                # T5's layers return the bias of positions as a view; nothing is written to it.
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
                return work()
        if not self._in_stage:
            raise RuntimeError("a divided model runs only where all processes take part: use LanguageModel.in_step")
        while (chosen := self._agree(name)) != name:
            assert chosen is not None
            self._run_idle(chosen)
        getattr(self._root, _GATHER)()
        return work()

    def _agree(self, wanted: str | None) -> str | None:
        """The part that all processes run next: the first that any of them wants; None if none does."""
        wishes = torch.tensor([int(name == wanted) for name in self._names])
        total = self._processes.total(wishes).tolist()
        return next((name for name, count in zip(self._names, total, strict=True) if count), None)

    def _run_idle(self, name: str) -> None:
        with torch.inference_mode(False), torch.no_grad():
            getattr(self._root, _GATHER)()
            self._idle[name]()

    def _free(self) -> None:
        """Free what is gathered, and what FSDP notes of every run for a gradient that may follow."""
        self._root.reset_iter_state()
        assert all(is_shard(parameter) for parameter in self._root.parameters())
