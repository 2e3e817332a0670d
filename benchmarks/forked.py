"""Children of a benchmark, forked from a process that has loaded the libraries and computed nothing.

So every child is as a fresh process, its peak memory included, and none has to load the libraries again.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

LIBRARIES = ("torch", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "accelerate", "tokenizers")
LIBRARIES += ("cdpg", "cdpg.training.trainer", "cdpg.preflight.probe", "cdpg.models.loading")


def forked(work: Callable[[], None], processes: int = 1) -> None:
    """Do ``work`` in so many processes, which find each other as those of ``torchrun`` do; wait for them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in LIBRARIES:
        importlib.import_module(name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    with tempfile.NamedTemporaryFile() as log:
        children = [_fork(work, rank, processes, port, log.name) for rank in range(processes)]
        if not _all_succeed(children):
            raise SystemExit(Path(log.name).read_text(errors="replace")[-3000:])


def _all_succeed(children: list[int]) -> bool:
    """Wait for all; when one fails, the others are ended: they would wait for it."""
    left = set(children)
    while left:
        child, status = os.wait()
        left.discard(child)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            return False
    return True


def _fork(work: Callable[[], None], rank: int, processes: int, port: int, log: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if processes > 1:
            facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            os.environ |= {name: str(value) for name, value in facts.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)
