"""The reference that tests/test_values.py compares with is itself right: known answers, enumeration, differences."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from reference import methods, randomness, target
from reference.methods import Method, Settings, Ziegler
from reference.model import END, Context, Parameters, Sequences, token_log_probs

CONTEXTS = [Context("a b", {}, 1), Context("d", {}, 2), Context("b a c", {}, 3)]


def table(seed: int, value: bool = False) -> Parameters:
    generator = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"tokens": (5, 3), "positions": (8, 3), "head": (5, 3)}
    shapes |= {"value": (3,), "bias": (1,)} if value else {}
    return {name: generator.normal(size=shape) for name, shape in shapes.items()}


def judge(context: Context, text: str) -> float | str:
    words = text.split()
    if words[:1] == ["c"]:
        return "value"
    return 1.0 if context.prompt[0] in words else 0.5 if "d" in words else 0.0


def outcomes(longest: int = 3) -> list[tuple[int, ...]]:
    """Every completion there is."""
    letters = range(1, 5)
    ended = [(*word, END) for length in range(longest) for word in product(letters, repeat=length)]
    return [*ended, *product(letters, repeat=longest)]


def epoch(policy: Parameters, base: Parameters, samples: int = 9) -> target.Judged:
    return target.sampled(policy, base, CONTEXTS, judge, 1, "train", 1, samples, 3)


def test_no_part_of_the_program_and_no_torch_is_used() -> None:
    for path in Path(methods.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"cdpg", "torch", "transformers"}, path


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    assert tuple(int(word) for word in randomness.philox(counter, key)) == words


def test_estimates_from_every_sample_in_its_proportion_are_the_exact_values() -> None:
    """A policy that draws all tokens alike makes each completion of n tokens 5⁻ⁿ of its samples: no noise is left."""
    base, policy = table(1), {name: 0 * values for name, values in table(1).items()}
    every = [x for x in outcomes() for _ in range(5 ** (3 - len(x)))]
    for context in CONTEXTS:
        many = target.judged(policy, base, [context], every, judge)
        x = Sequences.of([context.tokens] * 85, outcomes())
        a, pi = (np.exp(token_log_probs(model, x).sum(axis=1)) for model in (base, policy))
        assert (a.sum(), pi.sum()) == pytest.approx((1, 1), abs=1e-12)
        verdicts = [judge(context, text) for text in map(target.text, outcomes())]
        valid = np.array([not isinstance(verdict, str) for verdict in verdicts])
        b = np.array([0.0 if isinstance(verdict, str) else verdict for verdict in verdicts])
        share = pi[valid].sum()  # what is estimated is an expectation over the judged samples
        p = a * b / (a * b).sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            kl = np.where(p > 0, p * np.log(p / pi), 0.0).sum()
        assert many.z[0] == pytest.approx((a * b).sum() / share, abs=1e-12)
        assert target.kl_target_policy(many, 0.0)[0] == pytest.approx(kl + np.log(share), abs=1e-12)
        assert target.kl_policy_base(many)[0] == pytest.approx((pi * np.log(pi / a))[valid].sum() / share, abs=1e-12)
        assert target.effective_samples(many)[0] == pytest.approx(
            (a * b).sum() ** 2 / (pi * (a * b / pi) ** 2).sum() / share, abs=1e-12
        )


@pytest.mark.parametrize("method", ["cdpg", "dpg", "reinforce"])
def test_a_gradient_is_what_finite_differences_say(method: str) -> None:
    base, old, policy = table(1), table(2), table(3)
    credit = Method(Settings(method=method))
    credit.begin(epoch(old, base), old)
    rows = [row for row in range(27) if credit.active[row]]
    x, log_q = credit.epoch.x.rows(rows), credit.epoch.log_q.flatten()[rows]

    def constant_weights(parameters: Parameters) -> float:
        ratio = np.exp(token_log_probs(policy, x).sum(axis=1) - log_q) if method == "reinforce" else 1.0
        return float(-(credit.weights[rows] * ratio * token_log_probs(parameters, x).sum(axis=1)).sum() / 7)

    loss, gradient = credit.gradient(policy, rows, 7.0)
    assert loss == pytest.approx(constant_weights(policy), abs=1e-12)
    same_as_differences(constant_weights, policy, gradient)


def test_the_gradient_of_ppo_is_what_finite_differences_say() -> None:
    """With π ≠ q and a value head that is not 0, where both clips are at work."""
    base, old, policy = table(1), table(2, value=True), table(2, value=True)
    policy = {name: values + 0.2 * table(3, value=True)[name] for name, values in policy.items()}
    credit = Ziegler(Settings(method="ziegler"), base=base, beta=0.2)
    credit.begin(epoch(old, base), old)
    rows = [row for row in range(27) if credit.active[row]]
    x = credit.epoch.x.rows(rows)
    ratio = np.exp(token_log_probs(policy, x) - credit.log_q[rows])[x.counts]
    moved = np.abs(credit.values(policy, x) - credit.old_values[rows])[x.counts]
    assert 0.1 < (np.abs(ratio - 1) > 0.2).mean() < 0.9
    assert 0.1 < (moved > 0.2).mean() < 0.9
    _, gradient = credit.gradient(policy, rows, 7.0)
    assert abs(credit.advantages[credit.counted].mean()) < 1e-12
    same_as_differences(lambda parameters: credit.gradient(parameters, rows, 7.0)[0], policy, gradient)


def same_as_differences(loss: object, parameters: Parameters, gradient: Parameters) -> None:
    """Central differences, one number at a time."""
    assert callable(loss)
    step = 1e-6
    for name, values in parameters.items():
        for place in np.ndindex(values.shape):
            around = []
            for sign in (1, -1):
                moved = {**parameters, name: values.copy()}
                moved[name][place] += sign * step
                around.append(loss(moved))
            assert gradient[name][place] == pytest.approx((around[0] - around[1]) / (2 * step), abs=1e-8), (name, place)
