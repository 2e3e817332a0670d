"""The real vLLM as the sampler; ``make test-engine`` makes its environment, starts a server and runs these tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cdpg import CDPGConfig, CDPGTrainer
from cdpg.models.base import LanguageModel
from cdpg.models.engines.server import Server
from cdpg.models.engines.vllm import VLLMEngine, Wanted
from cdpg.models.rng import UniformStream
from cdpg.models.sampling import Chunk, sample_chunks
from cdpg.models.scoring import score_samples
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.storage.jsonl import read_jsonl
from cdpg.training.optimization import accumulate
from enumeration import flat_gradient

pytestmark = pytest.mark.timeout(3600)  # the machine may have no GPU and few cores

QUESTIONS = (
    "What is the capital of France?",
    "Name a colour.",
    "How many legs does a spider have?",
    "Say hello.",
)
LENGTH = 16
SAMPLES = 12
"""In a round; each sampler draws two."""
SHARPER = 1.15
"""Factor of the policy's logits over those of the base: a policy that is the base would have Ẑ_c = satisfaction."""

Note = Callable[[str, object], None]


def brief(prompts: list[Any], completions: list[Any], **columns: Any) -> list[bool]:
    """At most six words."""
    return [len(completion[0]["content"].split()) <= 6 for completion in completions]


class FirstSentence:
    """A text-based stop rule: the first full stop ends the answer."""

    watch = frozenset(".")

    def cut(self, completion: str) -> str | None:
        place = completion.find(".")
        return None if place < 0 else completion[: place + 1]


@pytest.fixture(scope="session")
def folder() -> Path:
    return Path(os.environ["CDPG_ENGINE_MODEL"])


@pytest.fixture(scope="session")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server of the model, started as the documentation says, or of one that runs already."""
    if "CDPG_ENGINE_URL" in os.environ:
        yield os.environ["CDPG_ENGINE_URL"]
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600"}  # the first step compiles a kernel
    # Not `vllm serve`, which in the build for CPUs looks for its version under another name and ends.
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    program += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    program += ["--enforce-eager", "--generation-config", "vllm"]
    program += ["--no-enable-chunked-prefill"]  # or it would rewind a generator, which those of CPUs cannot
    program += ["--worker-extension-cls", "cdpg.models.engines.worker.LoadsWeights"]
    with log.open("wb") as output:
        process = subprocess.Popen(program, env={**os.environ, **settings}, stdout=output, stderr=output)
        try:
            _wait(f"http://127.0.0.1:{port}/v1/models", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1800):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            time.sleep(1)
    raise AssertionError(log.read_text(errors="replace")[-3000:])


def trainer_of(folder: Path, output: Path, **settings: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 10, "contexts_per_epoch": 2, "num_generations": 8, "max_completion_length": LENGTH, "chat": True,
        "learning_rate": 5e-5, "warmup_epochs": 0, "device": "cpu", "evaluate_every": 0, "evaluate_at_end": False,
        "check_workers": 0, "output_dir": str(output), "engine_seconds": 3000.0, "save_every": 100, "replay": 0,
    }  # fmt: skip
    data = [{"prompt": question} for question in QUESTIONS]
    return CDPGTrainer(str(folder), brief, CDPGConfig(**(values | settings)), train_dataset=data)


class Parts:
    """A policy that has moved away from the base, and samplers of it: our own and the engine's."""

    def __init__(self, folder: Path, url: str, output: Path) -> None:
        made = trainer_of(folder, output, num_generations=SAMPLES)
        self.trainer, self.model = made, made.policy
        self.contexts, self.config = made.contexts, made.args
        with torch.no_grad():
            self.model.inner.model.norm.weight.mul_(SHARPER)  # type: ignore[attr-defined]
        self.model.save(output / "moved", made.args)
        self.prompts = self.model.encode(self.contexts, LENGTH)
        self.own = Sampler(self.model, made.base, made.judge, made.args, made.processes)
        server = Server.at(url, 3000.0, 200)
        server.load(str(output / "moved"), "moved")
        self.engine = VLLMEngine(server, self.model, self.model.vocabulary)  # type: ignore[attr-defined]
        self.theirs = replace(self.own, engine=self.engine)

    def draw(self, sampler: Sampler, number: int) -> Rollout:
        return sampler.draw(number, self.contexts, self.prompts, True, Stopwatch(), indices=range(len(self.contexts)))

    def gradient(self, rollout: Rollout) -> Tensor:
        """The gradient of the epoch's loss."""
        method = self.trainer.method
        loss = method.epoch_loss(method.begin(), rollout, self.model).samples
        self.model.module.zero_grad(set_to_none=True)
        rows = torch.arange(rollout.b.numel())[loss.active]
        accumulate(self.model, loss, rollout, rows, loss.normalizer, 1280)
        return flat_gradient(self.model)


@pytest.fixture(scope="session")
def parts(folder: Path, url: str, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return Parts(folder, url, tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="session")
def drawn(parts: Parts) -> dict[str, list[Rollout]]:
    """Two rounds of samples of the same contexts by each."""
    return {
        name: [parts.draw(sampler, number) for number in (1, 2)]
        for name, sampler in (("own", parts.own), ("engine", parts.theirs))
    }


def test_its_log_probabilities_are_the_model_s(
    parts: Parts, drawn: dict[str, list[Rollout]], record_property: Note
) -> None:
    """Token by token."""
    rows = torch.arange(drawn["engine"][0].b.numel())
    gaps = [r.samples.token_log_q - score_samples(parts.model, r.samples, rows, 1280) for r in drawn["engine"]]
    of_tokens = [float(gap.abs().max()) for gap in gaps]
    of_samples = [float(gap.sum(dim=2).abs().max()) for gap in gaps]
    assert max(float((r.log_q - r.log_a).abs().max()) for r in drawn["engine"]) > 0.1, "the base is another model"
    record_property("largest difference of a token", f"{max(of_tokens):.1e}")
    record_property("largest difference of a sample", f"{max(of_samples):.1e}")
    assert max(of_tokens) < 1e-3
    assert max(of_samples) < 5e-3


def pooled(rollouts: list[Rollout]) -> Rollout:
    first, second = rollouts
    names = ("b", "valid", "log_q", "log_a", "lengths")
    return replace(first, **{name: torch.cat([getattr(r, name) for r in (first, second)], dim=1) for name in names})


FIGURES: dict[str, Callable[[Rollout], Tensor]] = {
    "satisfaction": lambda rollout: rollout.b,
    "Z": lambda rollout: rollout.log_ratio.exp(),
    "length": lambda rollout: rollout.lengths.double(),
    "entropy": lambda rollout: -rollout.log_q,
}


def test_satisfaction_and_partition_agree_within_sampling_error(
    drawn: dict[str, list[Rollout]], record_property: Note
) -> None:
    own, theirs = pooled(drawn["own"]), pooled(drawn["engine"])
    for name, found in FIGURES.items():
        one, other = found(own), found(theirs)  # [context, sample]
        means = one.mean(dim=1), other.mean(dim=1)
        errors = (one.var(dim=1) + other.var(dim=1)) / one.shape[1]
        error = float(errors.sum().sqrt()) / len(errors)
        record_property(name, f"{means[0].mean():.4f} and {means[1].mean():.4f}, difference ± {error:.4f}")
        gap = (means[0] - means[1]).mean() / errors.sum().sqrt() * len(errors)
        assert abs(float(gap)) < 4, "the mean over contexts"
        worst = ((means[0] - means[1]).abs() / errors.sqrt().clamp(min=0.02)).max()
        assert float(worst) < 5, "each context"


def test_the_gradient_agrees_within_sampling_error(
    parts: Parts, drawn: dict[str, list[Rollout]], record_property: Note
) -> None:
    """Two gradients of ours differ by as much as one of ours and one of the engine's samples."""
    gradients = {name: [parts.gradient(rollout) for rollout in rollouts] for name, rollouts in drawn.items()}
    noise = [float((one - other).norm()) for one, other in gradients.values()]
    across = [float((one - other).norm()) for one in gradients["own"] for other in gradients["engine"]]
    for name, norms in (("of one's own", noise), ("across", across)):
        record_property(f"distances between gradients {name}", ", ".join(f"{norm:.3g}" for norm in norms))
    sums = [one + other for one, other in gradients.values()]
    record_property("cosine of the two samplers' means", f"{torch.cosine_similarity(*sums, dim=0):.3f}")
    assert max(across) < 1.5 * max(noise)
    assert min(across) > 0.3 * min(noise), "they are different samples"


def test_end_tokens_chat_templates_and_stop_rules_give_the_same_outcomes(parts: Parts) -> None:
    """What ends a completion, and its text, by the engine's tokens read once more as our own sampler reads them."""
    stream, rule = UniformStream(0, "train", 5), FirstSentence()
    plain = list(parts.engine.sample_chunks(parts.prompts, 8, LENGTH, stream, 256))
    stopped = list(parts.engine.sample_chunks(parts.prompts, 8, LENGTH, stream, 256, rule))
    seen = set()
    for whole, cut in zip(plain, stopped, strict=True):
        for i in range(8):
            ended = whole.tokens[i][-1] in parts.model.end_ids
            assert whole.ended[i] == ended
            assert ended or len(whole.tokens[i]) == LENGTH
            seen.add("end token" if ended else "limit")
            if rule.cut(cut.texts[i]) is not None:
                seen.add("stop rule")
                before = parts.model.decode(parts.prompts[0], cut.tokens[i][:-1])
                assert "." not in before or len(cut.tokens[i]) == 1
                assert cut.texts[i].endswith(".")
    assert seen == {"end token", "limit", "stop rule"}
    own = list(sample_chunks(parts.model, parts.prompts, 8, LENGTH, stream, 256, rule))
    assert abs(_share_ended(own) - _share_ended(stopped)) < 0.25


def _share_ended(chunks: list[Chunk]) -> float:
    ended = [one for chunk in chunks for one in chunk.ended]
    return sum(ended) / len(ended)


def flat_weights(model: LanguageModel) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])


def test_ten_epochs_with_weights_that_follow_the_policy(
    folder: Path, url: str, tmp_path: Path, record_property: Note
) -> None:
    made = trainer_of(folder, tmp_path / "run", engine="vllm", engine_url=url)
    made.train()
    records = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [record["epoch"] for record in records] == list(range(1, 11))
    outer = max(abs(record[f"engine_log_ratio_{name}"]) for record in records for name in ("low", "median", "high"))
    record_property("satisfaction by epoch", ", ".join(f"{record['satisfaction']:.2f}" for record in records))
    record_property("largest quantile of the log ratio", f"{outer:.1e}")
    record_property("seconds of an epoch", f"{records[-1]['seconds']:.0f}")
    assert outer < 0.01
    moved = flat_weights(made.policy) - flat_weights(made.base)
    record_property("largest change of a weight", f"{moved.abs().max():.1e}")
    assert float(moved.abs().max()) > 1e-4, "without weights that are sent, the ratio would not stay near 0"


def test_vllm_inside_this_program(folder: Path, tmp_path: Path) -> None:
    made = trainer_of(folder, tmp_path / "run", engine="vllm", epochs=2, contexts_per_epoch=4, num_generations=4)
    made.train()
    for record in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert max(abs(record[f"engine_log_ratio_{name}"]) for name in ("low", "median", "high")) < 0.01


def test_a_seed_is_repeated(parts: Parts) -> None:
    wanted = [Wanted(parts.prompts[0], 4, 8, 123, tuple(parts.model.end_ids))]
    one, other = (next(iter(parts.engine.connection.complete(wanted))) for _ in range(2))
    assert [c.tokens for c in one] == [c.tokens for c in other]
    assert len({c.tokens for c in one}) > 1, "each completion has a seed of its own"
