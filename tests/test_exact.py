"""Quasi-rejection sampling: the distribution of what is accepted and all figures, against enumeration; the command."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import closing
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import tiny
from cdpg import CDPGConfig, CDPGTrainer, ExactSampler
from cdpg.cli import app
from cdpg.cli.exact import with_bound
from cdpg.cli.output import shown_text
from cdpg.errors import CDPGError, RunError, UserError
from cdpg.jobs.exact import TunedRun
from cdpg.models.rng import UniformStream
from cdpg.models.tabular import TabularModel
from cdpg.rollout.exact import PILOT, accepted_rows
from cdpg.rollout.rollout import Rollout
from cdpg.rollout.sampler import Sampler
from cdpg.storage.json_files import write_yaml
from cdpg.storage.provenance import weights_digest
from cdpg.storage.run_folder import RunFolder
from cdpg.target.rejection import BOUND, choose_log_beta, log_acceptance, summarize_rejection, total_variation
from noticed import noticed

COUNTS = (5, 1, 4, 7, 3)
"""The policy gives these shares of 20 to five outcomes: 20 samples may have exactly its distribution."""
TARGET = np.array([0.05, 0.1, 0.0, 0.02, 0.06])
"""P; ratios P/π of 0.2, 2, 0, 0.057 and 0.4, Z = 0.23."""
POLICY = np.array(COUNTS) / 20
BETAS = (0.03, 0.1, 0.25, 1.0, 2.0, 5.0)


def ratios() -> Tensor:
    """log P/π of the 20 samples."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.repeat(np.log(TARGET / POLICY), COUNTS))


def accepted(beta: float) -> np.ndarray[Any, Any]:
    """p_β."""
    cut = np.minimum(TARGET, beta * POLICY)
    return cut / cut.sum()


@pytest.mark.parametrize("beta", BETAS)
def test_the_figures_are_those_of_the_distribution_of_the_samples(beta: float) -> None:
    found = summarize_rejection(ratios(), math.log(beta))
    ideal, near = TARGET / TARGET.sum(), accepted(beta)
    some = ideal > 0
    assert found.beta == pytest.approx(beta, rel=1e-12)
    assert found.z == pytest.approx(0.23, rel=1e-12)
    assert found.acceptance == pytest.approx(np.minimum(TARGET, beta * POLICY).sum() / beta, rel=1e-12)
    assert found.total_variation == pytest.approx(np.abs(ideal - near).sum() / 2, rel=1e-9, abs=1e-15)
    expected = (ideal[some] * np.log(ideal[some] / near[some])).sum()
    assert found.kl == pytest.approx(expected, rel=1e-9, abs=1e-14)
    assert found.kl >= 0
    if beta >= 2:
        assert (found.total_variation, found.kl) == (0, pytest.approx(0, abs=1e-14)), "it is p itself"


@pytest.mark.parametrize("beta", BETAS)
def test_what_is_accepted_is_distributed_as_p_beta(beta: float) -> None:
    """Each outcome as often as the policy draws it, with uniform numbers on a grid: shares are exact."""
    steps = 1000
    with np.errstate(divide="ignore"):
        log_ratio = torch.from_numpy(np.tile(np.repeat(np.log(TARGET / POLICY), COUNTS), steps)[None])
    grid = np.repeat((np.arange(steps) + 0.5) / steps, 20)
    rollout: Any = SimpleNamespace(b=log_ratio, log_ratio=log_ratio)
    uniforms: Any = SimpleNamespace(draw=lambda slots, samples, position: grid[samples])
    outcome = np.tile(np.repeat(np.arange(5), COUNTS), steps)
    counted = np.bincount(outcome[accepted_rows(rollout, math.log(beta), uniforms)], minlength=5)
    chance = np.minimum(1.0, TARGET / (beta * POLICY))
    exact = chance * steps * np.array(COUNTS)
    assert np.abs(counted - exact).max() <= max(COUNTS) / 2, "of a grid no more than half a step is lost"
    np.testing.assert_allclose(exact / exact.sum(), accepted(beta), rtol=1e-12)
    assert counted[2] == 0, "what does not satisfy is never accepted"
    np.testing.assert_allclose(log_acceptance(ratios(), math.log(beta)).exp(), np.repeat(chance, COUNTS), rtol=1e-12)


def expectation(count: int, beta: float) -> tuple[np.ndarray[Any, Any], float]:
    """Mean of acceptance, Ẑ, total variation and KL over all samples of that size, given that one satisfies; and how
    often that is."""
    log_ratio = torch.log(torch.tensor([0.2, 2.0, 0.0], dtype=torch.float64))
    policy, mean, whole = np.array([0.3, 0.1, 0.6]), np.zeros(4), 0.0
    for drawn in product(range(count + 1), repeat=2):
        rest = count - sum(drawn)
        if rest < 0 or rest == count:
            continue
        numbers = (*drawn, rest)
        chance = math.factorial(count) / math.prod(map(math.factorial, numbers)) * np.prod(policy ** np.array(numbers))
        found = summarize_rejection(log_ratio.repeat_interleave(torch.tensor(numbers)), math.log(beta))
        mean += chance * np.array([found.acceptance, found.z, found.total_variation, found.kl])
        whole += float(chance)
    return mean, whole


def test_the_estimates_in_expectation() -> None:
    """Acceptance and Ẑ are without bias; those of total variation and KL lose theirs as samples grow in number."""
    beta, target, policy = 0.5, np.array([0.06, 0.2]), np.array([0.3, 0.1])
    cut = np.minimum(target, beta * policy)
    ideal, near = target / target.sum(), cut / cut.sum()
    exact = np.array([np.abs(ideal - near).sum() / 2, (ideal * np.log(ideal / near)).sum()])
    off = []
    for count in (2, 10, 40):
        mean, _ = expectation(count, beta)
        assert mean[0] == pytest.approx(cut.sum() / beta, rel=1e-12)
        assert mean[1] == pytest.approx(target.sum(), rel=1e-12)
        off.append(np.abs(mean[2:] - exact))
    assert (off[0] > off[1]).all() and (off[1] > 2 * off[2]).all()
    assert (off[2] < 0.025).all()


@pytest.mark.parametrize("bound", [0.01, 0.05, 0.2, 0.4])
def test_beta_is_the_smallest_for_the_bound(bound: float) -> None:
    log_beta = choose_log_beta(ratios(), bound)
    assert total_variation(ratios(), log_beta) <= bound
    assert total_variation(ratios(), log_beta - 1e-6) > bound
    assert math.log(0.05) < log_beta < math.log(2.0)


def test_the_total_variation_falls_with_beta() -> None:
    generator = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(50, generator=generator, dtype=torch.float64) * 2
    found = [total_variation(log_ratio, float(log_beta)) for log_beta in torch.linspace(-6, 6, 60)]
    assert all(later <= sooner + 1e-15 for sooner, later in pairwise(found))
    assert found[0] > 0.5 > found[-1] == 0


def test_a_bound_that_every_beta_keeps_accepts_all_that_satisfies() -> None:
    log_beta = choose_log_beta(ratios(), 0.9)
    assert log_beta == pytest.approx(math.log(0.02 / 0.35), rel=1e-12)
    assert summarize_rejection(ratios(), log_beta).acceptance == pytest.approx(16 / 20, rel=1e-12)


# The whole way, on tables: base a, tuned model π, a soft or hard constraint.


def table(seed: int) -> TabularModel:
    return TabularModel(("p", "q"), ("a", "b", "c"), max_length=2, seed=seed)


def has_a(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return ["a" in completion for completion in completions]


def soft(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [{0: 0.0, 1: 0.3, 2: 0.9}[len(completion)] for completion in completions]


def make(constraint: Any = has_a, **settings: Any) -> ExactSampler:
    values: dict[str, Any] = {"max_completion_length": 2, "device": "cpu", "check_workers": 0}
    return ExactSampler(table(1), table(2), constraint, CDPGConfig(**(values | settings)))


def enumerated(constraint: Any, context: int) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """π, P and a of every outcome, by its tokens as text."""
    with torch.no_grad():
        policy, base = (table(seed).log_prob_table()[context].exp().tolist() for seed in (1, 2))
    names = [repr(outcome) for outcome in table(1).outcomes()]
    b = constraint([], [table(1).decode((), outcome) for outcome in table(1).outcomes()])
    target = {name: a * float(value) for name, a, value in zip(names, base, b, strict=True)}
    return dict(zip(names, policy, strict=True)), target, dict(zip(names, base, strict=True))


@pytest.mark.parametrize(
    ("constraint", "bound", "number"),
    [(has_a, 0.02, 800), pytest.param(has_a, 0.3, 2000, marks=pytest.mark.exhaustive), (soft, 0.1, 2000)],
)
def test_many_samples_are_of_p_beta(constraint: Any, bound: float, number: int) -> None:
    """Of the smallest bound they are fewer: one sample of forty is accepted."""
    found = make(constraint).sample("q", number=number, bound=bound)
    policy, target, base = enumerated(constraint, 1)
    beta = found.summary.beta
    cut = {name: min(target[name], beta * policy[name]) for name in policy}
    z, z_beta = sum(target.values()), sum(cut.values())
    counted = Counter(repr(sample.token_ids) for sample in found.samples)
    assert set(counted) <= {name for name in cut if cut[name] > 0}
    for name in cut:
        share = cut[name] / z_beta
        assert abs(counted[name] / number - share) <= 4 * math.sqrt(share * (1 - share) / number), name
    assert found.summary.acceptance == pytest.approx(z_beta / beta, rel=0.05)
    assert found.summary.z == pytest.approx(z, rel=0.05)
    exact = sum(abs(target[name] / z - cut[name] / z_beta) for name in cut) / 2
    assert found.summary.total_variation == pytest.approx(exact, abs=0.02)
    assert abs(exact - bound) < 0.05
    for sample in found.samples[:50]:
        assert sample.log_policy == pytest.approx(math.log(policy[repr(sample.token_ids)]), rel=1e-9)
        assert sample.log_base == pytest.approx(math.log(base[repr(sample.token_ids)]), rel=1e-9)
        assert sample.b == float(constraint([], [sample.text])[0])
    assert found.texts == [sample.text for sample in found.samples]


def test_the_pilot_serves_to_choose_beta_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[Rollout]] = {"exact-pilot": [], "exact": []}
    original = Sampler.draw

    def draw(self: Sampler, number: int, *rest: Any, stream: str, **more: Any) -> Rollout:
        assert number == len(drawn[stream]), "no round is drawn twice"
        drawn[stream].append(original(self, number, *rest, stream=stream, **more))
        return drawn[stream][-1]

    monkeypatch.setattr(Sampler, "draw", draw)
    found = make(seed=3).sample("p", number=5, bound=0.2)
    pilot, fresh = (torch.cat([rollout.log_ratio[0] for rollout in rounds]) for rounds in drawn.values())
    assert (found.pilot, found.draws) == (len(pilot), len(fresh)) == (PILOT, PILOT)
    log_beta = choose_log_beta(pilot, 0.2)
    assert found.summary == summarize_rejection(fresh, log_beta)
    expected = []
    for number, rollout in enumerate(drawn["exact"]):
        places = np.zeros(256, dtype=np.int64), np.arange(256)
        uniforms = UniformStream(3, "exact-acceptance", number).draw(*places, position=0)
        chances = np.minimum(1.0, np.exp(rollout.log_ratio[0].numpy() - log_beta))
        expected += [rollout.samples.texts[0][row] for row in np.flatnonzero(uniforms < chances)]
    assert len(expected) > 20
    assert found.texts == expected[:5], "the first that are accepted, each by a number of its own"


def test_a_seed_repeats_the_samples() -> None:
    texts = [make(seed=seed).sample("p", number=20).texts for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_acceptance_has_numbers_of_its_own() -> None:
    """A sample whose tokens were drawn by small numbers is not accepted more often for it."""
    rollout = next(make()._rounds(make()._encode("p"), "exact"))
    seen: list[str] = []

    class Recorded:
        def draw(self, slots: Any, samples: Any, position: int) -> Any:
            seen.append(f"{len(samples)} {position}")
            return np.full(len(samples), 0.5)

    uniforms: Any = Recorded()
    rows = accepted_rows(rollout, float(rollout.log_ratio.max()) - math.log(2), uniforms)
    assert seen == ["256 0"]
    expected = rollout.log_ratio[0] > rollout.log_ratio.max() - math.log(2) + math.log(0.5)
    assert list(rows) == expected.nonzero()[:, 0].tolist()


def never(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [False] * len(completions)


def rarely(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [completion == "ca" for completion in completions]


def failing(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [math.nan if completion == "b" else float("a" in completion) for completion in completions]


def broken(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    raise ZeroDivisionError("a bug")


def nowhere(prompts: list[str], completions: list[str], **columns: Any) -> list[None]:
    return [None] * len(completions)


def test_a_context_in_which_nothing_satisfies_ends_after_a_bounded_number_of_draws() -> None:
    with pytest.raises(RunError, match=r"none of 2,048 samples .* in this context.*: tune it for longer, give a"):
        make(never).sample("p", pilot=128)


def test_a_pilot_goes_on_until_no_sample_weighs_too_much() -> None:
    """One outcome satisfies: a sample has 1/k of the weight of k satisfying ones, a quarter of 0.02 where k is 200."""
    policy, target, _ = enumerated(rarely, 0)
    (chance,) = (policy[name] for name in policy if target[name] > 0)
    with noticed() as heard:
        found = make(rarely).sample("p", number=2, bound=0.02)
    assert found.texts == ["ca", "ca"]
    assert found.pilot % 256 == 0
    assert 0.8 * 200 / chance < found.pilot < 1.2 * 200 / chance + 256
    assert found.draws >= found.pilot, "the figures rest on as many"
    assert [notice for notice in heard if "far from p" in notice] == []


def test_a_tuned_model_that_is_far_from_p_is_told_of() -> None:
    with noticed() as heard:
        found = make(rarely).sample("p", number=1, bound=0.01, pilot=128)
    assert found.pilot == 16 * 128
    assert any(
        re.fullmatch(r"\d+ of 2,048 samples satisfy the constraint, and one of them has .*% of the .*", n)
        for n in heard
    )


def test_failed_checks_are_left_out() -> None:
    with noticed() as heard:
        found = make(failing).sample("p", number=50, bound=0.1)
    assert any("checks failed, and their samples are left out; for example, " in notice for notice in heard)
    assert PILOT - 256 < found.pilot < PILOT, "they are not counted"
    assert found.draws % 256
    assert "b" not in found.texts


@pytest.mark.parametrize(
    ("constraint", "kind", "message"),
    [
        (broken, RunError, r"the check of every one of 256 samples failed; for example, .*ZeroDivisionError.*fix the"),
        (nowhere, UserError, "no constraint applies to any of 256 samples of this context"),
    ],
)
def test_a_context_without_verdicts(constraint: Any, kind: type[CDPGError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make(constraint).sample("p")


@pytest.mark.parametrize("bound", [0.0, 1.0, -0.1, math.nan])
def test_a_bound_that_is_none(bound: float) -> None:
    with pytest.raises(UserError, match=r"must lie between 0 and 1, such as 0\.05, not "):
        make().sample("p", bound=bound)


def test_less_than_one_sample() -> None:
    with pytest.raises(UserError, match="number and pilot must be at least 1, not 0 and 512"):
        make().sample("p", number=0)


def test_a_base_that_gives_nan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = make()
    with torch.no_grad():
        sampler.base.table.fill_(math.nan)  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="the base's probabilities are not finite"):
        sampler.sample("p")


def test_a_missing_column_is_refused() -> None:
    def needy(prompts: list[str], completions: list[str], source: list[str]) -> list[bool]:
        return [text[:1] == given for text, given in zip(completions, source, strict=True)]

    with pytest.raises(UserError, match=r"takes 'source', which has no default.* a default$"):
        make(needy).sample("p")
    found = make(needy).sample({"prompt": "p", "source": "b"}, number=10)
    assert {text[0] for text in found.texts} == {"b"}


def even(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [len(completion) % 2 == 0 for completion in completions]


def test_models_with_other_tokens_are_refused(tmp_path: Path) -> None:
    models = [str(tiny.save(tmp_path / kind, kind)) for kind in ("llama", "t5")]
    sampler = ExactSampler(*models, even, {"max_completion_length": 4, "device": "cpu", "check_workers": 0})
    with pytest.raises(UserError, match=r"have different tokens, and P is defined on .* base: .*name the base that"):
        sampler.sample("two dogs")


def test_with_adapters_the_base_is_the_model_without_them(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = CDPGConfig(
        output_dir=str(tmp_path), epochs=1, contexts_per_epoch=2, num_generations=16, lora_rank=2, warmup_epochs=0,
        max_completion_length=4, learning_rate=0.05, device="cpu", check_workers=0,
    )  # fmt: skip
    trainer = CDPGTrainer(
        tiny.make_model("llama"), even, config, train_dataset=[{"prompt": "two dogs"}, {"prompt": "three cats"}],
        processing_class=tiny.tokenizer_for("llama"),
    )  # fmt: skip
    trainer.train()
    assert trainer.policy is trainer.base
    found = ExactSampler(trainer.policy, trainer.base, even, config).sample("two dogs", number=3, pilot=64)
    assert max(abs(sample.log_policy - sample.log_base) for sample in found.samples) > 1e-3
    assert all(len(text) % 2 == 0 for text in found.texts)


# The command.

CONSTRAINTS = """
def even(prompts, completions, **columns):
    return [len(completion) % 2 == 0 for completion in completions]


def never(prompts, completions, **columns):
    return [False] * len(completions)


def needy(prompts, completions, source):
    return [True] * len(completions)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that a command has made, as far as ``sample`` can tell."""
    folder = tmp_path_factory.mktemp("exact")
    (folder / "exact_rules.py").write_text(CONSTRAINTS, encoding="utf-8")
    tiny.save(folder / "llama", "llama")
    write_run(folder, "run")
    return folder


def write_run(folder: Path, name: str, **changes: Any) -> RunFolder:
    """A run whose tuned model is another than its base."""
    run = RunFolder(folder / name)
    model = tiny.make_model("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.004 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    run.path.mkdir()
    model.save_pretrained(run.model)
    tiny.tokenizer_for("llama").save_pretrained(run.model)
    config = CDPGConfig(max_completion_length=4, device="cpu", check_workers=0, trust_remote_code=True, seed=9)
    named = {"model": "llama", "contexts": "c.txt", "constraint": ["exact_rules:even"]}
    values = {**config.to_mapping(), **named, **changes}
    write_yaml(run.config, {key: value for key, value in values.items() if value is not None})
    return run


def cdpg(folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """Status, output and errors of a command."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    if isinstance(result.exception, CDPGError):
        return result.exception.exit_status, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, result.stderr


def test_samples_of_the_ideal_model_by_command(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["run", "--context", "two dogs", "-n", "3", "--seed", "1"]
    status, output, _ = cdpg(place, "sample", *words, "--exact", monkeypatch=monkeypatch)
    assert status == 0
    with closing(TunedRun.read("run").sampler(CDPGConfig(max_completion_length=4, device="cpu", seed=1))) as sampler:
        samples = sampler.sample("two dogs", number=3).samples
    shown = re.findall(r"^log-probability (-[\d.]+), (\d) tokens", output, re.MULTILINE)
    assert shown == [(f"{sample.log_policy:.2f}", str(len(sample.token_ids))) for sample in samples]
    assert all(len(sample.text) % 2 == 0 for sample in samples)
    assert all(shown_text(sample.text).plain in output for sample in samples)
    figures = dict(re.findall(r"│ ([^│]+?) +│ +([\d.,]+) │", output))
    assert list(figures) == [
        "bound β on P/π", "acceptance rate", "draws for a sample", "draws of the base for a sample, 1/Z",
        "total variation to p", "KL(p, samples), nats", "draws that these figures come from",
        "draws of the pilot that chose β",
    ]  # fmt: skip
    assert 0.02 < float(figures["total variation to p"]) < 0.08
    assert float(figures["draws for a sample"]) == pytest.approx(1 / float(figures["acceptance rate"]), abs=0.1)
    again = cdpg(place, "sample", *words, "--exact", "0.05", monkeypatch=monkeypatch)[1]
    assert again == output, "it is the default"
    other = cdpg(place, "sample", "--exact", "0.4", *words, monkeypatch=monkeypatch)[1]
    assert dict(re.findall(r"│ ([^│]+?) +│ +([\d.,]+) │", other))["bound β on P/π"] < figures["bound β on P/π"]


def test_the_seed_that_repeats_exact_samples_is_shown(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, errors = cdpg(place, "sample", "run", "--context", "two dogs", "--exact", monkeypatch=monkeypatch)
    assert re.search(r"the same samples again: --seed \d+\n", errors)
    assert re.search(r"β = [\d.]+, chosen by [\d,]+ draws; [\d.]+% of the next draws should be accepted", errors)


REFUSED = [
    (
        "llama",
        [],
        2,
        "'llama' is not a run's folder, and samples of the ideal model need the base and the constraint that ",
    ),
    (
        "python",
        [],
        2,
        "the constraint, since the run was started in Python: use cdpg.ExactSampler",
    ),
    ("gone", [], 2, "--exact judges samples by the run's constraint, and there is no module 'no_such_rules'"),
    ("renamed", [], 2, "by the run's constraint, and 'exact_rules' has no function 'evn'; did you mean 'even'?; start"),
    ("moved", [], 2, "there is no folder './elsewhere'"),
    (
        "needy",
        [],
        2,
        "or give the parameter a default; a context given on the command line has no columns: use cdpg",
    ),
    ("never", [], 1, "none of 8,192 samples of the tuned model satisfies the constraint in this context"),
    ("run", ["2"], 2, "--exact takes a total variation between 0 and 1, such as 0.05, not 2"),
    ("run", ["-0.5"], 2, "--exact takes a total variation between 0 and 1, such as 0.05, not -0.5"),
    ("run", ["nan"], 2, "--exact takes a total variation between 0 and 1, such as 0.05, not nan"),
]


@pytest.mark.parametrize(("run", "bound", "status", "message"), REFUSED, ids=[f"{r[0]}{r[1]}" for r in REFUSED])
def test_what_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch, run: str, bound: list[str], status: int, message: str
) -> None:
    changes: dict[str, dict[str, Any]] = {
        "python": {"model": None, "contexts": None, "constraint": None},
        "gone": {"constraint": ["no_such_rules:even"]},
        "renamed": {"constraint": ["exact_rules:evn"]},
        "moved": {"model": "./elsewhere"},
        "needy": {"constraint": ["exact_rules:needy"]},
        "never": {"constraint": ["exact_rules:never"]},
    }
    if run in changes:
        write_run(place, run, **changes[run])
    words = ["sample", run, "--context", "two dogs", "--exact", *bound]
    found = cdpg(place, *words, monkeypatch=monkeypatch)
    assert found[0] == status
    assert message in found[2]
    assert found[1] == ""


def test_a_run_of_a_task_gets_the_column_of_its_task(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(place, "task", task="translation-numbers", constraint=None, model=None, contexts=None)
    monkeypatch.chdir(place)
    tuned = TunedRun.read(run.path)
    assert tuned.base == "t5-tiny"
    prompt = "translate English to French: two dogs"
    for text in ("two dogs", prompt):
        context = tuned.context(text)
        assert (context.prompt, context.columns) == (prompt, {"source": "two dogs"})


def test_another_base_than_the_run_s_is_told_of(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    with closing(TunedRun.read(place / "run").sampler()) as sampler:
        digest = weights_digest(sampler.base.module)
    for name, written, told, more in (
        ("same", digest, 0, {}),
        ("other", "0" * 64, 1, {}),
        ("narrow", "0" * 64, 0, {"base_dtype": "bfloat16"}),
    ):
        run = write_run(place, name, origin={"base": written}, **more)
        with noticed() as heard:
            TunedRun.read(run.path).sampler().close()
        assert sum("are not those that the run started from" in notice for notice in heard) == told


def test_a_run_s_own_settings_count_and_its_leave_to_run_code_does_not(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    with closing(TunedRun.read(place / "run").sampler()) as sampler:
        assert (sampler.config.max_completion_length, sampler.config.check_workers) == (4, 0)
        assert sampler.config.trust_remote_code is False


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["run", "--exact"], ["run", "--exact", str(BOUND)]),
        (["--exact", "run", "-n", "2"], ["--exact", str(BOUND), "run", "-n", "2"]),
        (["run", "--exact", "--context", "x"], ["run", "--exact", str(BOUND), "--context", "x"]),
        (["run", "--exact", "0.2"], ["run", "--exact", "0.2"]),
        (["run", "--exact", ".2"], ["run", "--exact", ".2"]),
        (["run", "--exact", "-1"], ["run", "--exact", "-1"]),
        (["run", "--exact=0.2"], ["run", "--exact=0.2"]),
        (["run", "--exact", "inf"], ["run", "--exact", "inf"]),
        (["--exact", "info-run"], ["--exact", str(BOUND), "info-run"]),
        (["run", "--context", "x"], ["run", "--context", "x"]),
    ],
)
def test_the_bound_may_be_left_out(given: list[str], expected: list[str]) -> None:
    assert with_bound(given) == expected
