"""Chooses the device, and checks that it supports the precision."""

from __future__ import annotations

import subprocess
import sys

import torch

from cdpg.config import CDPGConfig
from cdpg.errors import UserError, first_line


def choose_device(config: CDPGConfig) -> torch.device:
    """The device in the settings, or the best available one."""
    if config.device != "auto":
        try:
            device = torch.device(config.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            why = first_line(error)[:100]
            raise UserError(
                f"device is {config.device!r}, which cannot be used here ({why}): give auto, cpu, cuda or mps"
            ) from error
        return device
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def check_precision(config: CDPGConfig, device: torch.device) -> None:
    """Try bfloat16 on a CPU in another process: on some CPUs an unsupported instruction kills the process."""
    if config.dtype != "bfloat16" or device.type != "cpu":
        return
    # ``python -c`` puts the working folder first in sys.path; nothing may be imported from it.
    start = "import sys; sys.path[:] = filter(None, sys.path); import torch; "
    trial = start + "a = torch.ones(64, 64, dtype=torch.bfloat16); (a @ a).sum().item()"
    result = subprocess.run([sys.executable, "-c", trial], capture_output=True, check=False)
    if result.returncode != 0:
        raise UserError(
            f"dtype is 'bfloat16', but a bfloat16 product ends the process on this CPU (status {result.returncode}): "
            f"use dtype: float32"
        )
