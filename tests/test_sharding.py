"""Weights that are divided among processes: the same run as that of one process, on models of three families."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import sharded_run
import tiny
import warm
from cdpg import CDPGConfig
from cdpg.models.base import Rows
from cdpg.models.loading import wrap_model
from cdpg.models.sharding import Lockstep, repeated_blocks, with_weights, without_weights
from cdpg.storage.jsonl import read_jsonl
from cdpg.system.distributed import Processes
from fake_vllm import FakeVLLM, serving
from rounds import ordinary
from sharded_run import HALF, RUNS, epochs


def launch(count: int, folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "launch.py").write_text("from torch.distributed.run import main\n\nmain()\n", encoding="utf-8")
    start = [warm.python(), str(folder / "launch.py"), "--standalone", "--nproc_per_node", str(count)]
    script = Path(__file__).parent / "sharded_run.py"
    return subprocess.run(
        [*start, str(script), *words], capture_output=True, text=True, timeout=500, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    sharded_run.save_models(folder)
    return folder


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    """Without times, figures apart."""
    records = list(read_jsonl(run / name)) if (run / name).exists() else []
    return [{key: value for key, value in record.items() if not key.startswith("seconds")} for record in records]


def tokens(run: Path) -> list[str]:
    """The tokens of all samples of a run, of all processes, with their prompts."""
    return sorted(line for path in run.glob("tokens-*.jsonl") for line in path.read_text().splitlines())


def assert_same_run(one: Path, other: Path, resumed: bool = False) -> None:
    """The same samples, token for token, and the same weights up to rounding."""
    if not resumed:
        assert tokens(one) == tokens(other)
    for single, double in zip(lines(one, "metrics.jsonl"), lines(other, "metrics.jsonl"), strict=True):
        assert {k: v for k, v in single.items() if v is not None} == pytest.approx(
            {k: v for k, v in double.items() if v is not None}, rel=1e-3, abs=1e-4
        )
    for single, double in zip(lines(one, "evaluations.jsonl"), lines(other, "evaluations.jsonl"), strict=True):
        for metric in ("satisfaction", "satisfaction_beam", "share_of_a"):
            assert single["metrics"][metric]["mean"] == pytest.approx(double["metrics"][metric]["mean"], abs=1e-4)
    assert largest_difference(one, other) < 1e-5


def moved(models: Path, run: Path, family: str) -> float:
    """How far the run has moved the weights."""
    return largest_difference_of(load_file(models / family / "model.safetensors"), weights(run))


def largest_difference_of(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (2, ("llama",)),
        *(pytest.param(count, tuple(RUNS), marks=pytest.mark.exhaustive) for count in (2, 4)),
    ],
    ids=["some", "all", "four"],
)
def test_divided_weights_are_tuned_as_whole_ones(
    tmp_path: Path, models: Path, count: int, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all kinds of runs; and runs are resumed, to the same bits or with the other way of holding the weights."""
    if len(names) > 1:
        monkeypatch.setenv("SHARDED_EPOCHS", "5")
    one, many = tmp_path / "one", tmp_path / "many"
    for name in names:
        sharded_run.trainer(models, one / name, name, "none").train()
    if len(names) > 1:
        sharded_run.half(one / "llama", many / "half" / "llama-whole")
    result = launch(count, tmp_path, str(models), str(many), *names)
    assert result.returncode == 0, result.stderr[-5000:]
    for name, (family, settings) in ((name, RUNS[name]) for name in names):
        assert_same_run(one / name, many / name)
        if name != "llama":  # whose best model may be the base
            assert moved(models, many / name, family) > 3e-4
        assert len(lines(many / name, "metrics.jsonl")) == settings.get("epochs", epochs())
    early, late = (load_file(many / f"llama/checkpoints/epoch-{n:06d}/weights.safetensors") for n in (HALF, epochs()))
    assert largest_difference_of(early, late) > 1e-4
    again = many / "half" / "llama-again"
    assert largest_difference(many / "llama", again) == 0, "resumed with as many processes, to the same bits"
    for name in ("weights", "optimizer", "best"):
        file = f"checkpoints/epoch-{epochs():06d}/{name}.safetensors"
        assert (many / "llama" / file).read_bytes() == (again / file).read_bytes()
        first, second = load_file(one / "llama" / file), load_file(many / "llama" / file)
        assert largest_difference_of(first, second) < (1e-5 if name != "optimizer" else 1e-3)
    if len(names) > 1:
        assert_same_run(one / "llama", many / "half" / "llama-whole", resumed=True)
    back = sharded_run.half(many / "llama", tmp_path / "back")
    sharded_run.trainer(models, back, "llama", "none").train(resume_from_checkpoint=True)
    assert_same_run(one / "llama", back, resumed=True)


def test_a_process_that_dies_ends_the_others_and_the_run_goes_on(tmp_path: Path, models: Path) -> None:
    run = tmp_path / "run"
    result = launch(2, tmp_path, "deadly", str(models), str(run))
    assert result.returncode != 0
    assert time.time() - (run / "died").stat().st_mtime < 60
    assert result.stderr.count("another process of this run has ended") == 1
    assert "resume_from_checkpoint=True" in result.stderr
    assert len(lines(run, "metrics.jsonl")) == HALF
    sharded_run.trainer(models, run, "gpt2", "none").train(resume_from_checkpoint=True)
    sharded_run.trainer(models, tmp_path / "whole", "gpt2", "none").train()
    assert_same_run(tmp_path / "whole", run, resumed=True)


@pytest.mark.exhaustive
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, models: Path) -> None:
    """Of two processes with parts of the weights: with four that have parts, and with two that have all of them."""
    two = tmp_path / "two"
    assert launch(2, tmp_path, str(models), str(two), "llama").returncode == 0
    sharded_run.trainer(models, tmp_path / "one", "llama", "none").train()
    for count, sharding in ((4, "full"), (2, "none"), (1, "none")):
        run = sharded_run.half(two / "llama", tmp_path / f"{count}-{sharding}")
        result = launch(count, tmp_path, sharding, str(models), str(run))
        assert result.returncode == 0, result.stderr[-5000:]
        assert_same_run(tmp_path / "one", run, resumed=True)


@pytest.mark.exhaustive
def test_an_engine_is_sent_whole_weights_and_asked_by_every_process(tmp_path: Path, models: Path) -> None:
    fake, run = FakeVLLM(models / "gpt2"), tmp_path / "run"
    with serving(fake) as url:
        result = launch(2, tmp_path, "engine", str(models), str(run), url)
    assert result.returncode == 0, result.stderr[-5000:]
    assert len(fake.loads) == epochs(), "by one process"
    assert len([path for path, _ in fake.asked if path == "/v1/completions"]) == 3 * epochs()
    assert moved(models, run, "gpt2") > 1e-2, "otherwise old weights would do as well"
    for record in lines(run, "metrics.jsonl"):
        assert max(abs(record[f"engine_log_ratio_{name}"]) for name in ("low", "median", "high")) < 1e-3


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", ordinary(tiny.FAMILIES, "gpt2", "llama", "t5"))
def test_a_layer_s_gradient_is_complete_before_the_next_layer_s(family: str, recomputes: bool) -> None:
    """Of what follows the prompts first, then of the prompts: otherwise the gradients of all layers would be whole."""
    prompts = [(5, 6, 7), (8, 9)]
    rows = Rows(torch.tensor([0, 0, 1]), torch.arange(3, 15).view(3, 4), torch.tensor([4, 2, 3]))
    found, added = [], []
    for divided in (False, True):
        module: Any = tiny.make_model(family)
        model = wrap_model(module, tiny.tokenizer_for(family), CDPGConfig())
        model.recomputes = recomputes
        decoder = [p for block in repeated_blocks(module.get_decoder()) for p in block.parameters()]
        counts = dict.fromkeys(decoder, 0)
        for parameter in decoder:
            parameter.register_post_accumulate_grad_hook(lambda p, counts=counts: counts.update({p: counts[p] + 1}))
        if divided:
            module.gather_root = lambda: None
            model.lockstep = Lockstep(module, {}, Processes(None))  # type: ignore[arg-type]
            model.lockstep.differentiates = True
        model.backward((model.score(prompts, rows).log_prob() * torch.arange(1.0, 4.0)).sum())
        found.append([p.grad for p in module.parameters()])
        added.append(set(counts.values()))
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-5) for one, other in zip(*found, strict=True))
    # Keys and values of the encoder's output are computed with the prompts alone.
    assert added == [{1}, {1, 2} if family in tiny.SEQ2SEQ else {2}]


@pytest.mark.exhaustive
def test_a_process_takes_less_than_six_tenths_of_the_memory() -> None:
    """Over two epochs: in the second, Adam's moments are held while gradients are computed."""
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "memory.py"
    result = subprocess.run(
        [sys.executable, str(script), "sharding", "--width", "512", "--layers", "16"], capture_output=True, text=True,
        check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    until_the_last_epoch, _ = map(float, result.stdout.splitlines()[-1].split(", "))
    assert until_the_last_epoch < 0.6, result.stdout


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_layers_of_every_family_are_found(family: str) -> None:
    model = tiny.make_model(family)
    blocks = repeated_blocks(model)
    assert len(blocks) == (4 if family in tiny.SEQ2SEQ else 2)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [name for name, parameter in model.named_parameters() if id(parameter) not in inside]
    assert not [name for name in outside if any(digit in name for digit in "0123456789")]


def test_a_model_without_repeated_layers_has_none() -> None:
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.ReLU()]))) == []


@pytest.mark.parametrize("family", ["llama", "t5", "gpt2"])
def test_a_model_without_weights_gets_them_back(family: str) -> None:
    model = tiny.make_model(family)
    empty = without_weights(model)
    assert all(parameter.is_meta for parameter in empty.parameters())
    twin = with_weights(empty, model, keep=True)
    assert twin is not None
    assert with_weights(empty, model, keep=False) is None
    assert dict(twin.named_parameters()).keys() == dict(model.named_parameters()).keys(), "tied weights stay tied"
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    assert {id(p) for p in twin.parameters()}.isdisjoint(id(p) for p in model.parameters())
