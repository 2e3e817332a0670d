"""``rft``, ``raft`` and ``rloo``: their coefficients in plain NumPy, their expected gradients by enumeration."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tiny
from cdpg import CDPGConfig, CDPGTrainer
from cdpg.errors import UserError
from cdpg.methods import METHODS, EpochLoss, make_method
from cdpg.models.scoring import score_samples
from cdpg.models.tabular import TabularModel
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler, Stopwatch
from cdpg.storage.jsonl import read_jsonl
from cdpg.training.optimization import accumulate
from enumeration import Universe, contexts_of, tabular
from test_optimization import Steps, make_updater, shuffled
from uneven import VALID, Array, B, M, N, completions, log_prob_gradient, scored, table, uneven_epoch

RIVALS = ("rft", "raft", "rloo")
LIKELIHOODS = ("rft", "raft")
BETA = 0.3
DRAWN = [x for row in completions() for x in row]


def epoch(share: range = range(N), number: int = 1) -> Rollout:
    return uneven_epoch(table(1), table(2), number=number, share=share)


def likelihood() -> Array:
    """b/Σb in each context, so that the contexts with a satisfying sample count equally: 3 of 5, 13 valid samples."""
    b = np.where(VALID, B, 0.0)
    total = b.sum(axis=1, keepdims=True)
    assert ((total > 0).sum(), VALID.sum()) == (3, 13)
    return b / np.where(total > 0, total, 1.0) * 13 / 3


def advantages(beta: float = BETA) -> Array:
    """b − β log(q/a), minus its mean over the other samples of the context whose check succeeded."""
    log_q, log_a = (scored(table(seed), completions()).sum(axis=2) for seed in (1, 2))
    rewards, found = B - beta * (log_q - log_a), np.zeros((N, M))
    for context, sample in np.argwhere(VALID):
        others = [rewards[context, j] for j in range(M) if j != sample and VALID[context, j]]
        found[context, sample] = rewards[context, sample] - np.mean(others)
    return found


EXPECTED = {"rft": likelihood(), "raft": likelihood(), "rloo": advantages()}


def losses(name: str, rollout: Rollout, **settings: Any) -> EpochLoss:
    method = make_method(CDPGConfig(method=name, rloo_beta=BETA, **settings))
    return method.epoch_loss(method.begin(), rollout, table(0))


@pytest.mark.parametrize("name", RIVALS)
def test_the_coefficient_of_every_sample(name: str) -> None:
    found = losses(name, epoch()).samples
    assert found.weights is not None
    np.testing.assert_allclose(found.weights.view(N, M).numpy(), EXPECTED[name], rtol=1e-12, atol=1e-15)
    assert found.normalizer == VALID.sum()
    assert found.active.tolist() == (VALID if name == "rloo" else EXPECTED[name] != 0).ravel().tolist()


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_contexts_with_a_satisfying_sample_count_equally(name: str) -> None:
    found = losses(name, epoch()).samples
    assert found.weights is not None
    shares = found.weights.view(N, M).sum(dim=1) / found.normalizer
    assert shares.tolist() == pytest.approx([1 / 3, 1 / 3, 0.0, 0.0, 1 / 3], rel=1e-12)


@pytest.mark.parametrize("name", RIVALS)
def test_a_loss_holds_the_rows_of_this_process_and_the_divisor_of_all(name: str) -> None:
    found = losses(name, epoch(share=range(1, 3))).samples
    assert found.weights is not None
    np.testing.assert_allclose(found.weights.numpy(), EXPECTED[name][1:3].ravel(), rtol=1e-12, atol=1e-15)
    assert found.normalizer == VALID.sum()
    assert len(found.active) == N * M


@pytest.mark.parametrize("name", RIVALS)
def test_loss_and_gradient_after_a_step(name: str) -> None:
    """π is no longer q: the likelihoods do not mind; ``rloo`` multiplies by π/q and pays for log π instead of log q."""
    policy, rows = table(0), [4 * M + 2, 4, 0, 1, 2 * M + 1, M + 3]
    log_pi = scored(policy, completions()).sum(axis=2).ravel()
    moved = log_pi - scored(table(1), completions()).sum(axis=2).ravel()
    weight = EXPECTED[name].ravel()
    if name == "rloo":
        weight = np.exp(moved) * (weight - BETA * moved)
    loss = accumulate(policy, losses(name, epoch()).samples, epoch(), torch.tensor(rows), 7.0, tokens_per_pass=9)
    assert loss == pytest.approx(-(weight * log_pi)[rows].sum() / 7.0, rel=1e-12)
    expected = -sum(weight[row] * log_prob_gradient(policy, row // M, DRAWN[row]) for row in rows) / 7.0
    assert policy.table.grad is not None
    np.testing.assert_allclose(policy.table.grad.numpy(), expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_several_passes_over_ragged_batches(name: str) -> None:
    """Each pass in an order of its own, each step with the same divisor."""
    policy, rollout = table(0), epoch(number=2)
    batches = shuffled(2, seed=5, passes=3)
    assert len({tuple(batch) for batch in batches}) == len(batches)
    steps = Steps(likelihood())
    steps.take(batches, VALID.sum() * 6 / 20)
    method = make_method(CDPGConfig(method=name, **{f"{name}_passes": 3}))
    updater = make_updater(policy, method, batch_size=6, seed=5)
    steps.assert_agrees(policy, updater.update(rollout, method.begin()))


def test_rloo_takes_steps_on_ragged_batches_of_every_valid_sample() -> None:
    class RLOOSteps(Steps):
        def gradient(self, rows: list[int], divisor: float) -> tuple[float, Array]:
            log_pi = scored(self.policy, completions()).sum(axis=2).ravel()
            moved = log_pi - self.log_q
            weights = np.where(VALID.ravel(), np.exp(moved) * (self.weights - BETA * moved), 0.0)
            parts = [weights[row] * log_prob_gradient(self.policy, row // M, DRAWN[row]) for row in rows]
            return -float((weights * log_pi)[rows].sum()) / divisor, -np.sum(parts, axis=0) / divisor

    policy, steps = table(0), RLOOSteps(advantages())
    steps.take(shuffled(1, seed=3, passes=1), VALID.sum() * 6 / 20)
    method = make_method(CDPGConfig(method="rloo", rloo_beta=BETA))
    updater = make_updater(policy, method, batch_size=6, seed=3)
    steps.assert_agrees(policy, updater.update(epoch(), method.begin()))


def test_the_only_sample_of_a_context_has_no_baseline() -> None:
    rollout = epoch()
    rollout.valid[1, 1:] = False
    found = losses("rloo", rollout).samples
    assert found.weights is not None
    reward = B[1, 0] - BETA * float(rollout.log_q[1, 0] - rollout.log_a[1, 0])
    assert float(found.weights.view(N, M)[1, 0]) == pytest.approx(reward, rel=1e-12)


def test_rloo_logs_the_distance_from_the_base() -> None:
    log_q, log_a = (scored(table(seed), completions()).sum(axis=2) for seed in (1, 2))
    kl = (log_q - log_a)[VALID].mean()
    assert losses("rloo", epoch()).metrics == {"kl_policy_base": pytest.approx(kl, rel=1e-12)}


# Expectations over every draw: two contexts with four outcomes each, two samples a context, 256 epochs in all.

CONTEXTS, SAMPLES = 2, 2


def small(seed: int) -> TabularModel:
    return TabularModel(("p", "q"), ("a", "b", "c"), max_length=1, seed=seed)


class Case:
    """Policy π, base a and proposal q; b of every outcome, hard or soft; which of the samples have a verdict."""

    def __init__(self, name: str, q: str, soft: bool, failed: bool) -> None:
        self.policy, models = small(1), {"policy": small(1), "base": small(2), "other": small(3)}
        self.method = make_method(CDPGConfig(method=name, rloo_beta=BETA))
        with torch.no_grad():
            self.log_q, self.log_a = models[q].log_prob_table(), models["base"].log_prob_table()
        assert self.log_q.shape == (CONTEXTS, 4)
        b = [[0.3, 1.0, 0.0, 0.6], [0.5, 0.0, 0.9, 0.2]] if soft else [[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0]]
        self.b = torch.tensor(b, dtype=torch.float64)
        self.valid = torch.ones(CONTEXTS, SAMPLES, dtype=torch.bool)
        self.valid[0, 1] = not failed

    def gradient(self) -> Tensor:
        """The mean over all epochs of the gradient of one step, by the production loss."""
        log_pi = self.policy.log_prob_table()
        whole = log_pi.new_zeros(())
        for drawn in product(range(self.b.shape[1]), repeat=CONTEXTS * SAMPLES):
            index = torch.tensor(drawn).view(CONTEXTS, SAMPLES)
            b, log_q, log_a = (tensor.gather(1, index) for tensor in (self.b, self.log_q, self.log_a))
            samples: Any = SimpleNamespace(contexts=("p", "q"))
            rollout = Rollout(
                number=1, b=b.where(self.valid, 0.0), valid=self.valid, failed=~self.valid, log_q=log_q, log_a=log_a,
                lengths=index, samples=samples, token_log_a=log_a, first_context=0,
            )  # fmt: skip
            loss = self.method.epoch_loss({}, rollout, self.policy).samples
            rows = loss.active.nonzero()[:, 0]
            chosen = log_pi.gather(1, index).flatten()[rows]
            scores: Any = SimpleNamespace(log_prob=lambda chosen=chosen: chosen)
            whole = whole + log_q.sum().exp() * loss.loss(rows, scores) / loss.normalizer
        return self._gradient_of(whole)

    def _gradient_of(self, loss: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(loss, self.policy.table)
        return found

    def shares(self) -> list[float]:
        """E[1{context c has a satisfying sample} / how many contexts have one], from the chances of each."""
        z = (self.log_q.exp() * self.b).sum(dim=1)
        first, second = (1 - (1 - z) ** self.valid.sum(dim=1)).tolist()
        return [first * (1 - second / 2), second * (1 - first / 2)]

    def cross_entropy(self) -> Tensor:
        """Σ_c share_c · CE(q_b, π), with q_b ∝ q·b."""
        log_filtered = (self.log_q + self.b.log()).log_softmax(dim=1)
        parts = -(log_filtered.exp() * self.policy.log_prob_table()).sum(dim=1)
        return self._gradient_of((parts * torch.tensor(self.shares(), dtype=torch.float64)).sum())

    def objective(self) -> Tensor:
        """−E_π[b − β log(π/a)], contexts weighted by how many of their samples have a verdict."""
        log_pi = self.policy.log_prob_table()
        value = (log_pi.exp() * (self.b - BETA * (log_pi - self.log_a))).sum(dim=1)
        weights = self.valid.double().sum(dim=1) / self.valid.sum()
        return self._gradient_of(-(value * weights).sum())


@pytest.mark.parametrize("failed", [False, True])
def test_the_expected_gradient_of_rft_is_that_of_the_cross_entropy_from_p(failed: bool) -> None:
    """However far the policy is from the base; each context times the chance of a satisfying sample, shared evenly."""
    case = Case("rft", "base", soft=False, failed=failed)
    expected = case.cross_entropy()
    assert expected.norm() > 0.1
    torch.testing.assert_close(case.gradient(), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("q", ["policy", "other"])
@pytest.mark.parametrize("failed", [False, True])
def test_the_expected_gradient_of_raft_is_that_of_the_cross_entropy_from_the_filtered_proposal(
    q: str, failed: bool
) -> None:
    case = Case("raft", q, soft=False, failed=failed)
    torch.testing.assert_close(case.gradient(), case.cross_entropy(), rtol=1e-9, atol=1e-13)


def test_at_the_first_step_raft_climbs_the_logarithm_of_satisfaction() -> None:
    case = Case("raft", "policy", soft=False, failed=False)
    satisfaction = (case.policy.log_prob_table().exp() * case.b).sum(dim=1)
    shares = torch.tensor(case.shares(), dtype=torch.float64)
    expected = case._gradient_of(-(satisfaction.log() * shares).sum())
    torch.testing.assert_close(case.gradient(), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("q", ["policy", "other"])
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("soft", [False, True])
def test_the_expected_gradient_of_rloo_is_that_of_its_objective(q: str, failed: bool, soft: bool) -> None:
    """Whatever policy has drawn the samples: the baseline, and a verdict that is missing by chance, cost no bias."""
    case = Case("rloo", q, soft=soft, failed=failed)
    torch.testing.assert_close(case.gradient(), case.objective(), rtol=1e-9, atol=1e-13)


# Whole runs.


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def trainer_of(folder: Path, **changes: Any) -> CDPGTrainer:
    values: dict[str, Any] = {
        "epochs": 3, "contexts_per_epoch": 3, "num_generations": 8, "max_completion_length": 3, "learning_rate": 0.2,
        "warmup_epochs": 0, "device": "cpu", "save_every": 1000, "log_samples": 24, "check_workers": 0,
    }  # fmt: skip
    config = CDPGConfig(output_dir=str(folder), **(values | changes))
    data = [{"prompt": str(context.prompt)} for context in contexts_of(3)]
    return CDPGTrainer(tabular(4), has_a, config, train_dataset=data)


def enumerated(trainer: CDPGTrainer) -> tuple[Tensor, Tensor, Tensor]:
    """log π, log a and b of every outcome."""
    universe = Universe.of(trainer.policy, contexts_of(3))
    b = universe.satisfied(lambda prompt, text: "a" in text)
    return universe.log_prob(trainer.policy), universe.log_prob(trainer.base), b


def test_rft_draws_from_the_base_and_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """log q is the base's, in epochs in which the policy is elsewhere; nothing is scored by the base to know log a."""
    trainer = trainer_of(tmp_path, method="rft")
    with monkeypatch.context() as unscored:
        unscored.setattr(trainer.base, "score", None)
        trainer.train()
    with torch.no_grad():
        log_pi, log_a = trainer.policy.log_prob_table(), trainer.base.log_prob_table()  # type: ignore[attr-defined]
    outcomes = {outcome: place for place, outcome in enumerate(trainer.policy.outcomes())}  # type: ignore[attr-defined]
    seen = [sample for sample in read_jsonl(tmp_path / "samples.jsonl") if sample["epoch"] > 1]
    assert len(seen) == 48
    for sample in seen:
        place = sample["row"] - 1, outcomes[tuple(sample["token_ids"])]
        assert sample["log_q"] == pytest.approx(float(log_a[place]), rel=1e-12)
        assert sample["log_a"] in (None, sample["log_q"])
    assert (log_pi - log_a).abs().max() > 0.5, "the policy has moved"


def test_in_the_first_epoch_all_methods_draw_the_same(tmp_path: Path) -> None:
    drawn = []
    for name in ("rft", "cdpg", "rloo"):
        trainer_of(tmp_path / name, method=name, epochs=1).train()
        drawn.append([sample["completion"] for sample in read_jsonl(tmp_path / name / "samples.jsonl")])
    assert drawn[0] == drawn[1] == drawn[2]


def test_records_say_whose_samples_they_are_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer_of(tmp_path / "rft", method="rft", num_generations=64).train()
    satisfaction = [record["satisfaction"] for record in read_jsonl(tmp_path / "rft" / "metrics.jsonl")]
    for record in read_jsonl(tmp_path / "rft" / "metrics.jsonl"):
        assert record["samples_of_base"] is True
        assert record["kl_target_policy"] is None
        assert record["satisfaction"] == pytest.approx(record["z_mean"], rel=1e-12)
        assert record["steps"] == 4
    assert f"satisfaction of the base {satisfaction[-1]:.3f}, " in capsys.readouterr().err
    trainer_of(tmp_path / "raft", method="raft").train()
    for record in read_jsonl(tmp_path / "raft" / "metrics.jsonl"):
        assert "samples_of_base" not in record
        assert record["kl_target_policy"] is not None
    assert "of the base" not in capsys.readouterr().err


def test_with_adapters_the_base_is_drawn_from_with_its_adapters_off(tmp_path: Path) -> None:
    pytest.importorskip("peft")

    def even(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
        return [len(completion) % 2 == 0 for completion in completions]

    config = CDPGConfig(
        output_dir=str(tmp_path), method="rft", epochs=1, contexts_per_epoch=2, num_generations=8, lora_rank=2,
        max_completion_length=5, learning_rate=0.1, warmup_epochs=0, device="cpu", check_workers=0,
    )  # fmt: skip
    data = [{"prompt": "two dogs"}, {"prompt": "three cats"}]
    trainer = CDPGTrainer(
        tiny.make_model("llama"), even, config, train_dataset=data, processing_class=tiny.tokenizer_for("llama")
    )
    trainer.train()
    sampler = Sampler(trainer.base, trainer.base, trainer.judge, trainer.args, trainer.processes, policy_is_base=True)
    prompts = trainer.policy.encode(trainer.contexts, config.max_completion_length)
    found = sampler.draw(2, trainer.contexts, prompts, False, Stopwatch())
    rows = torch.arange(16)
    with trainer.policy.as_base():
        expected = score_samples(trainer.policy, found.samples, rows, 500).sum(dim=2)
    tuned = score_samples(trainer.policy, found.samples, rows, 500).sum(dim=2)
    torch.testing.assert_close(found.log_q, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.log_q, found.log_a)
    assert (tuned - expected).abs().max() > 0.1


def ideal_kl(log_pi: Tensor, log_target: Tensor) -> float:
    log_ideal = log_target.log_softmax(dim=1)
    gap = (log_ideal - log_pi).masked_fill(log_ideal == -math.inf, 0.0)
    return float((log_ideal.exp() * gap).sum(dim=1).mean())


@pytest.mark.exhaustive
def test_where_runs_end(tmp_path: Path) -> None:
    """``rft`` at p, ``rloo`` at a·exp(b/β); ``raft`` satisfies as often and is elsewhere."""
    found = {}
    long = {"epochs": 60, "num_generations": 128, "learning_rate": 0.15, "decay_epochs": 50, "rft_passes": 2}
    short = {"epochs": 36, "num_generations": 96, "learning_rate": 0.2, "decay_epochs": 36, "rloo_beta": 0.5}
    for name in RIVALS:
        trainer = trainer_of(tmp_path / name, method=name, **(long if name == "rft" else short))
        trainer.train()
        log_pi, log_a, b = enumerated(trainer)
        found[name] = {
            "p": ideal_kl(log_pi, (log_a + b.log()).masked_fill(b == 0, -math.inf)),
            "a·exp(b/β)": ideal_kl(log_pi, log_a + b / 0.5),
            "satisfaction": float((log_pi.exp() * b).sum(dim=1).mean()),
        }
    assert found["rft"]["p"] < 0.05
    assert found["rft"]["satisfaction"] > 0.97
    assert found["raft"]["satisfaction"] > 0.97
    assert found["raft"]["p"] > 0.3
    assert found["rloo"]["a·exp(b/β)"] < 0.02


def test_settings_out_of_range_are_refused() -> None:
    for settings, message in (
        ({"rft_passes": 0}, "rft_passes must be at least 1, not 0"),
        ({"raft_passes": -1}, "raft_passes must be at least 1, not -1"),
        ({"rloo_beta": -0.1}, "rloo_beta must be a finite number of at least 0, not -0.1"),
        ({"rloo_beta": math.inf}, "rloo_beta must be a finite number of at least 0, not inf"),
    ):
        with pytest.raises(UserError, match=message):
            CDPGConfig(**settings)


def test_what_a_method_needs() -> None:
    made = {name: make_method(CDPGConfig(method=name, rft_passes=2, raft_passes=3)) for name in METHODS}
    assert {name for name, method in made.items() if method.proposal == "base"} == {"rft"}
    assert {name for name, method in made.items() if method.scores_every_sample} == {"rloo", "ziegler"}
    assert {name for name, method in made.items() if method.differentiates_every_sample} == {"cdpg", "rloo", "ziegler"}
    assert {name for name, method in made.items() if method.targets_p} == {"cdpg", "cdpg-paper", "dpg", "rft"}
    assert [made[name].passes for name in ("rft", "raft", "rloo", "cdpg")] == [2, 3, 1, 1]
