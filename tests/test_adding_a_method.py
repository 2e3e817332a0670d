"""A method is one file: this one defines a method with a setting of its own and takes it through the commands."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor
from typer.testing import CliRunner

import tiny
from cdpg import CDPGConfig
from cdpg.cli import app
from cdpg.cli.completion import complete_method, complete_setting
from cdpg.config import FIELDS, MethodSettings
from cdpg.errors import UserError
from cdpg.methods import METHODS, State, Style, WeightedMethod, make_method, register, unregister
from cdpg.methods.reinforce import Reinforce
from cdpg.rollout.rollout import Rollout
from cdpg.values import not_positive
from unpainted import is_one_of_a_kind, painted_if, unpainted

COLOR, DARK = "#123abc", "#abc123"


@dataclass(frozen=True)
class PowerSettings(MethodSettings):
    """The settings of the method below."""

    power_exponent: float = 2.0
    """What b is raised to."""

    def problems(self) -> Iterable[str]:
        return not_positive(self, "power_exponent")


class Power(WeightedMethod):
    """w = b(x,c) to a power; it counts its epochs."""

    name = "power"
    label = "b to a power"
    description = "the constraint, raised to a power"
    style = Style(COLOR, DARK, "*")
    Settings = PowerSettings

    def begin(self) -> State:
        return {"epochs": 0}

    def advance(self, state: State, rollout: Rollout) -> State:
        return {"epochs": state["epochs"] + 1}

    def weights(self, rollout: Rollout, state: State) -> Tensor:
        weights = rollout.b ** self.config.settings_of(PowerSettings).power_exponent
        return weights.masked_fill(~rollout.valid, 0.0)

    def metrics(self, state: State) -> dict[str, float]:
        return {"power_epochs": state["epochs"]}


@pytest.fixture(autouse=True)
def power() -> Iterator[None]:
    register(Power)
    yield
    unregister("power")


def even(prompts: list[str], completions: list[str], **columns: Any) -> list[bool]:
    return [len(completion) % 2 == 0 for completion in completions]


def cdpg(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options of a small job of one's own."""
    monkeypatch.chdir(tmp_path)
    tiny.save(tmp_path / "llama", "llama")
    Path("tuning.txt").write_text("two dogs\nthree cats\n", encoding="utf-8")
    Path("held_out.txt").write_text("one dog\nfour cats\n", encoding="utf-8")
    options = {
        "--model": "llama", "--contexts": "tuning.txt", "--eval-contexts": "held_out.txt", "--epochs": "2",
        "--constraint": "test_adding_a_method:even",
    }  # fmt: skip
    settings = {
        "contexts_per_epoch": 2, "num_generations": 4, "max_completion_length": 6, "evaluation_samples": 2,
        "device": "cpu", "check_workers": 0, "power_exponent": 1.5,
    }  # fmt: skip
    words = [word for option in options.items() for word in option]
    return words + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def test_run(job: list[str]) -> None:
    cdpg("run", *job, "--method", "power", "--output-dir", "run", "--no-report")
    config = yaml.safe_load(Path("run/config.yaml").read_text(encoding="utf-8"))
    assert (config["method"], config["power_exponent"], config["ziegler_beta"]) == ("power", 1.5, 0.2)
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["power_epochs"] for record in records] == [1, 2]
    state = json.loads(Path("run/checkpoints/epoch-000002/state.json").read_text(encoding="utf-8"))
    assert state["objective"] == {"epochs": 2}
    assert "`power`: the constraint, raised to a power" in Path("run/model/README.md").read_text(encoding="utf-8")
    cdpg("run", "--resume", "--output-dir", "run", "--epochs", "3", "--no-report")
    assert json.loads(Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["power_epochs"] == 3


def test_compare_and_report(job: list[str]) -> None:
    with unpainted():
        cdpg("compare", *job, "--methods", "cdpg,power", "--output-dir", "both")
    models = json.loads(Path("both/comparison.json").read_text(encoding="utf-8"))["models"]
    assert list(models) == ["base", "cdpg", "power"]
    with painted_if(is_one_of_a_kind):
        cdpg("report", "both", "--output", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert "b to a power" in page
    assert COLOR in page
    assert DARK in page


def test_settings_and_completion() -> None:
    shown = cdpg("settings", "power")
    assert "power_exponent" in shown
    assert "2.0" in shown
    assert "What b is raised to." in shown
    assert "power (the constraint, raised to a power)" in " ".join(cdpg("settings", "method").replace("│", " ").split())
    assert complete_method("pow") == ["power"]
    assert complete_setting("power") == ["power_exponent="]


def test_the_setting_is_one_like_any_other() -> None:
    config = CDPGConfig(method="power", power_exponent="3")
    assert config.power_exponent == 3.0
    assert config.replace(epochs=7).power_exponent == replace(config, epochs=7).power_exponent == 3.0
    assert config.replace(power_exponent=4).to_mapping()["power_exponent"] == 4.0
    assert config != CDPGConfig(method="power")
    assert config == CDPGConfig.from_mapping(config.to_mapping())
    assert isinstance(make_method(config), Power)
    for wrong, message in (
        ({"power_exponent": 0}, "power_exponent must be above 0 and finite, not 0.0"),
        ({"power_exponent": "much"}, "power_exponent takes a number, not 'much'"),
        ({"power_exponnt": 1}, "did you mean 'power_exponent'"),
        ({"method": "powre"}, "not 'powre'; did you mean 'power'"),
    ):
        with pytest.raises(UserError, match=message):
            CDPGConfig(**wrong)


def test_it_is_forgotten_again() -> None:
    unregister("power")
    assert "power" not in METHODS
    assert "power_exponent" not in FIELDS
    with pytest.raises(UserError, match="unknown setting 'power_exponent'"):
        CDPGConfig(power_exponent=1)
    register(Power)


def test_a_name_is_given_once() -> None:
    class Other(Reinforce):
        name = "other"
        Settings = PowerSettings

    for method, taken in ((Power, "'power'"), (Other, "'power_exponent'")):
        with pytest.raises(ValueError, match=f"{taken} is there already"):
            register(method)
    assert "other" not in METHODS


def test_dataclass_functions_see_the_setting() -> None:
    config = CDPGConfig(method="power", power_exponent=3.0)
    given = asdict(config)
    assert given["power_exponent"] == 3.0
    assert list(given) == [field.name for field in fields(CDPGConfig)] == list(FIELDS)
    assert CDPGConfig(**json.loads(json.dumps(given))) == CDPGConfig(**vars(config)) == config
    assert repr(config).endswith("power_exponent=3.0)")
    assert CDPGConfig.power_exponent == 2.0


@dataclass(frozen=True)
class _Extended(CDPGConfig):
    mine: int = 1


def test_a_dataclass_of_ones_own_that_extends_the_settings_hands_them_to_the_method() -> None:
    config = _Extended(ziegler_beta=0.7, mine=2)
    assert make_method(config.replace(method="ziegler")).begin() == {"beta": 0.7}
    with pytest.raises(UserError, match="ziegler_beta must be a finite number"):
        _Extended(ziegler_beta=-1.0)
