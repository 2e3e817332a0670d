"""Two machines, as network namespaces with a cable between them: a run across both, the cable pulled, the run resumed.

A namespace has a network of its own, so that processes in one reach those in the other through the cable alone. It
takes root and the program ``ip``; elsewhere these tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import tiny
from cdpg.storage.jsonl import read_jsonl

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

EPOCHS, HALF = 4, 2
SECONDS = 8
"""That a process waits for the others."""
RULES = f'''
"""The constraint; in the middle of a run that is told so, it waits until the cable is pulled."""
import os, time
from pathlib import Path

def odd(prompts, completions, **columns):
    folder = Path(os.environ["CDPG_TEST_FOLDER"])
    metrics = folder / "run" / "metrics.jsonl"
    while (folder / "wait").exists() and metrics.exists() and len(metrics.read_text().splitlines()) >= {HALF}:
        (folder / "waits").touch()
        time.sleep(0.1)
    return [float(len(text) % 2) for text in completions]
'''
LAUNCHERS = {
    "torchrun": (
        "torch.distributed.run", "--nnodes", "2", "--node_rank", "{number}", "--nproc_per_node", "1",
        "--master_addr", "{address}", "--master_port", "29517",
    ),
    "accelerate": (
        "accelerate.commands.launch", "--multi_gpu", "--num_machines", "2", "--machine_rank", "{number}",
        "--num_processes", "2", "--main_process_ip", "{address}", "--main_process_port", "29517",
        "--mixed_precision", "no", "--dynamo_backend", "no",
    ),
}  # fmt: skip
"""Their modules and options, with the machine's number and the address of the first."""


@dataclass(frozen=True)
class Machines:
    """Two machines that are connected by a cable."""

    names: tuple[str, str]
    address = "10.213.7."

    def connect(self) -> None:
        one, two = self.names
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", one, "type", "veth", "peer", "name", "cable", "netns", two)
        for number, name in enumerate(self.names, start=1):
            ip("-n", name, "address", "add", f"{self.address}{number}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")

    def pull_cable(self) -> None:
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def plug_in_cable(self) -> None:
        ip("-n", self.names[1], "link", "set", "cable", "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def launch(self, launcher: str, folder: Path, *words: str) -> list[subprocess.Popen[bytes]]:
        """The launcher on each, with one process; what they say goes to ``said-0`` and ``said-1``."""
        here = {
            "GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1", "CDPG_TEST_FOLDER": str(folder),
            "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
            "RES_OPTIONS": "timeout:1 attempts:1",  # no name server can be reached
        }  # fmt: skip
        started = []
        for number, name in enumerate(self.names):
            program = ["ip", "netns", "exec", name, sys.executable, "-m", *LAUNCHERS[launcher]]
            program = [word.format(number=number, address=f"{self.address}1") for word in program]
            program += ["-m", "cdpg", *words]
            with (folder / f"said-{number}").open("wb") as said:
                started.append(
                    subprocess.Popen(program, env={**os.environ, **here}, stdout=said, stderr=said, cwd=folder)
                )
        return started


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines((f"cdpg-one-{os.getpid()}", f"cdpg-two-{os.getpid()}"))
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces take root and the program ip")
    try:
        made.connect()
        yield made
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    finally:
        made.remove()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, prompts, the constraint and a configuration."""
    tiny.save(tmp_path / "model", "llama")
    (tmp_path / "rules.py").write_text(RULES)
    (tmp_path / "prompts.txt").write_text("\n".join(("two dogs", "the fox", "one cat", "go on")) + "\n")
    settings = {
        "model": "model", "contexts": "prompts.txt", "constraint": "rules:odd", "epochs": EPOCHS,
        "contexts_per_epoch": 4, "num_generations": 4, "max_completion_length": 6, "learning_rate": 5e-4,
        "warmup_epochs": 0, "device": "cpu", "check_workers": 0, "save_every": 1, "adam_epsilon": 1e-4,
        "process_seconds": SECONDS, "evaluate_at_end": False,
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path


def wait_for(happened: Callable[[], bool], seconds: float = 120) -> float:
    """Seconds until it did."""
    started = time.monotonic()
    while not happened():
        assert time.monotonic() - started < seconds
        time.sleep(0.1)
    return time.monotonic() - started


def said(folder: Path) -> list[str]:
    return [(folder / f"said-{number}").read_text(errors="replace") for number in (0, 1)]


@pytest.mark.parametrize(("launcher", "sharding"), [("torchrun", "none"), ("torchrun", "full"), ("accelerate", "none")])
def test_a_run_across_two_machines_ends_if_the_cable_is_pulled_and_goes_on(
    machines: Machines, folder: Path, launcher: str, sharding: str, record_property: Callable[[str, object], None]
) -> None:
    words = ("run", "run.yaml", "--output-dir", "run", "--set", f"sharding={sharding}")
    (folder / "wait").touch()
    started = machines.launch(launcher, folder, *words)
    try:
        wait_for((folder / "waits").exists)
        machines.pull_cable()
        (folder / "wait").unlink()
        seconds = wait_for(lambda: all(process.poll() is not None for process in started))
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert seconds < 60
    record_property("seconds until both have ended", round(seconds, 1))
    assert all(process.returncode != 0 for process in started)
    one, two = said(folder)
    assert one.count("another process of this run has ended or cannot be reached") == 1
    assert "--resume" in one
    assert "the run has lost one of its processes" in two
    assert len(list(read_jsonl(folder / "run" / "metrics.jsonl"))) == HALF
    machines.plug_in_cable()
    again = machines.launch(launcher, folder, *words, "--resume")
    assert [process.wait(300) for process in again] == [0, 0], said(folder)
    whole = [sys.executable, "-m", "cdpg", "run", "run.yaml", "--output-dir", "whole"]
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CDPG_TEST_FOLDER": str(folder), "PYTHONPATH": paths}
    subprocess.run(whole, check=True, cwd=folder, env=environment, capture_output=True)
    first, second = (load_file(folder / run / "model" / "model.safetensors") for run in ("run", "whole"))
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5
    base = load_file(folder / "model" / "model.safetensors")
    assert max(float((first[name] - base[name]).abs().max()) for name in first) > 1e-4
    assert torch.isfinite(torch.cat([weight.flatten() for weight in first.values()])).all()
