"""Settings: typed, checked all at once, and answered in the user's own words."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Seq2SeqTrainingArguments
from typer.testing import CliRunner

from cdpg import CDPGTrainer
from cdpg.cli import app
from cdpg.config import FIELDS, CDPGConfig, parse_overrides, read_yaml
from cdpg.errors import UserError
from cdpg.jobs.job import Job, gather
from cdpg.messages.foreign_names import ANSWERS, ARGUMENTS, FAMILIES, answer, unknown_argument, unknown_setting
from cdpg.messages.terms import on_command_line
from cdpg.methods import METHODS


def test_defaults_follow_the_paper() -> None:
    config = CDPGConfig()
    assert (config.contexts_per_epoch, config.partition_epsilon, config.epochs) == (32, 1e-8, 1000)
    assert config.warmup == 100
    assert CDPGConfig(epochs=50).warmup == 5
    assert CDPGConfig(epochs=5000).warmup == 100
    assert config.ziegler_beta == 0.2
    assert {config.rate(epoch) for epoch in range(100, 1001)} == {1e-5}, "constant after the warm-up"


def test_the_rate_rises_stays_and_falls() -> None:
    config = CDPGConfig(epochs=8, learning_rate=1.0, warmup_epochs=2, decay_epochs=3)
    assert [config.rate(epoch) for epoch in range(1, 9)] == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    short = config.replace(epochs=2)
    assert [short.rate(epoch) for epoch in (1, 2)] == [0.5, 1 / 3], "a decay longer than the run is the run's"
    assert [config.replace(warmup_epochs=0, decay_epochs=0).rate(epoch) for epoch in (1, 8)] == [1, 1]


def test_what_follows_from_other_settings() -> None:
    config = CDPGConfig(contexts_per_epoch=5, num_generations=7, epochs=35)
    assert config.samples_per_epoch == 35
    assert config.evaluation_interval == 3
    assert config.replace(epochs=9).evaluation_interval == 1
    assert config.replace(evaluate_every=4).evaluation_interval == 4


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("learning_rate", "1e-5", 1e-5),
        ("epochs", 7.0, 7),
        ("batch_size", None, None),
        ("report_to", "tensorboard", ("tensorboard",)),
        ("report_to", ["a", "b"], ("a", "b")),
        ("adam_betas", [0.5, 0.9], (0.5, 0.9)),
        ("max_grad_norm", 1, 1.0),
        ("epochs", "5", 5),
        ("epochs", "1e3", 1000),
        ("seed", "9007199254740993", 2**53 + 1),
        ("seed", 2**53 + 1, 2**53 + 1),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("output_dir", Path("runs") / "x", str(Path("runs") / "x")),
    ],
)
def test_values_are_read_as_their_type(key: str, value: Any, expected: Any) -> None:
    for config in (
        CDPGConfig.from_mapping({key: value}),
        CDPGConfig(**{key: value}),
        CDPGConfig().replace(**{key: value}),
    ):
        found = getattr(config, key)
        assert (found, type(found)) == (expected, type(expected))


def test_values_that_depend_on_each_other_are_compared_as_numbers() -> None:
    config = CDPGConfig(contexts_per_epoch="4", num_generations=8.0, batch_size="32")  # type: ignore[arg-type]
    assert (config.samples_per_epoch, config.batch_size) == (32, 32)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("epochs", "many", "epochs takes a whole number, not 'many'"),
        ("epochs", 1.5, "epochs takes a whole number, not 1.5"),
        ("epochs", True, "epochs takes a whole number, not True"),
        ("epochs", float("inf"), "epochs takes a whole number, not inf"),
        ("epochs", "1e999", "epochs takes a whole number, not '1e999'"),
        ("learning_rate", 10**400, "learning_rate takes a number"),
        ("method", "ppo", f"method takes {' or '.join(map(repr, METHODS))}, not 'ppo'"),
        ("adam_betas", [0.9], "adam_betas takes a list"),
        ("trust_remote_code", "yes", "trust_remote_code takes true or false, not 'yes'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(key: str, value: Any, message: str) -> None:
    for make in (lambda: CDPGConfig.from_mapping({key: value}), lambda: CDPGConfig(**{key: value})):
        with pytest.raises(UserError) as error:
            make()
        assert message in str(error.value)


@pytest.mark.parametrize("text", ["1e999", ".inf", "-.inf", ".nan"])
def test_what_is_no_whole_number_is_refused_after_set(text: str) -> None:
    with pytest.raises(UserError, match="epochs takes a whole number"):
        CDPGConfig.from_mapping(parse_overrides([f"epochs={text}"]))


def test_every_value_of_the_wrong_type_is_reported_at_once() -> None:
    with pytest.raises(UserError, match=r"epochs takes .*; seed takes "):
        CDPGConfig(epochs="many", seed="s")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epochs", 0), ("learning_rate", float("nan")), ("learning_rate", -1.0), ("max_grad_norm", 0.0),
        ("seed", -1), ("seed", 2**64),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_meant_is_refused(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=key):
        CDPGConfig(**{key: value})


def test_a_batch_larger_than_the_epoch_is_refused() -> None:
    with pytest.raises(UserError, match="batch_size is 65, more than the 64 samples"):
        CDPGConfig(contexts_per_epoch=4, num_generations=16, batch_size=65)


def test_unknown_settings_are_answered_with_the_nearest_all_at_once() -> None:
    settings: dict[str, Any] = {"learnign_rate": 1, "num_train_epochs": 3, "epochs": "x"}
    for make in (lambda: CDPGConfig.from_mapping(settings), lambda: CDPGConfig(**settings)):
        with pytest.raises(UserError) as error:
            make()
        message = str(error.value)
        assert "did you mean 'learning_rate'" in message
        assert "use epochs (here an epoch is one round of sampling" in message
        assert "epochs takes a whole number" in message


def test_a_setting_is_recognised_whatever_its_case() -> None:
    with pytest.raises(UserError, match="unknown setting 'EPOCHS': did you mean 'epochs'"):
        CDPGConfig.from_mapping({"EPOCHS": 3})


def test_the_signature_names_every_setting() -> None:
    assert list(inspect.signature(CDPGConfig).parameters) == list(FIELDS)
    with pytest.raises(UserError, match="unknown setting 'epoch': did you mean 'epochs'"):
        CDPGConfig().replace(epoch=3)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_train_epochs", "epochs"), ("max_steps", "epochs"), ("save_steps", "save_every"),
        ("save_total_limit", "keep_checkpoints"), ("eval_steps", "evaluate_every"),
        ("warmup_steps", "warmup_epochs"), ("per_device_train_batch_size", "batch_size"),
    ],
)  # fmt: skip
def test_hugging_face_names_are_answered_with_the_setting_meant(name: str, meant: str) -> None:
    assert meant in FIELDS
    with pytest.raises(UserError, match=f"unknown setting '{name}': use {meant}"):
        CDPGConfig.from_mapping({name: 1})


OF_TRL = """
    model_init_kwargs router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 num_generations_eval
    ds3_gather_for_generation shuffle_dataset pad_to_multiple_of generation_batch_size steps_per_generation temperature
    top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode
    vllm_server_base_url vllm_gpu_memory_utilization vllm_importance_sampling_correction beta num_iterations epsilon
    delta epsilon_high sapo_temperature_neg vespo_k_pos importance_sampling_level reward_weights
    multi_objective_aggregation scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
    ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy entropy_target
    max_tool_calling_iterations off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
    transformers_continuous_batching_config use_transformers_paged max_prompt_length reward_funcs
"""
"""What GRPOConfig has beside the fields of TrainingArguments."""
OWN = {*FIELDS, *(field.name for field in dataclasses.fields(Job))} - {"settings"}


def test_every_name_of_transformers_and_trl_has_an_answer() -> None:
    names = [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)]
    assert len(names) > 100
    for name in [*names, *OF_TRL.split()]:
        if name not in FIELDS:
            message = unknown_setting(name, OWN)
            assert "did you mean" not in message, message
            assert message == f"unknown setting {name!r}: {answer(name)}"


OF_TRAINERS = """
    reward_funcs reward_processing_classes data_collator model_init compute_loss_func compute_metrics optimizers
    preprocess_logits_for_metrics optimizer_cls_and_kwargs tools rollout_func environment_factory quantization_config
    ref_model reward_model value_model tokenizer
"""
"""Arguments of Transformers' Trainer and of TRL's trainers that are none here."""


def test_every_argument_of_other_trainers_has_an_answer() -> None:
    own = [name for name in inspect.signature(CDPGTrainer).parameters if name != "self"]
    assert not set(OF_TRAINERS.split()) & set(own)
    for name in OF_TRAINERS.split():
        message = unknown_argument(name, own, FIELDS)
        assert "did you mean" not in message and "the arguments are" not in message, message
    texts = [text for _, text in ARGUMENTS]
    assert not {name for group, _ in ARGUMENTS for name in group.split()} & set(own), "an argument needs none"
    for text in texts:
        assert set(re.findall(r"\w+_\w+", text)) <= {*own, *FIELDS}, text


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("reward_funcs", "unknown argument 'reward_funcs': use constraints (a function of prompts and completions"),
        ("tokenizer", "unknown argument 'tokenizer': use processing_class"),
        ("ref_model", "unknown argument 'ref_model': the base stays as it was loaded"),
        ("epochs", "unknown argument 'epochs': it is a setting: pass args=CDPGConfig(epochs=…)"),
        ("ziegler_beta", "it is a setting: pass args=CDPGConfig(ziegler_beta=…)"),
        ("num_train_epochs", "unknown argument 'num_train_epochs': use epochs (here an epoch is one round"),
        ("constrants", "unknown argument 'constrants': did you mean 'constraints'?"),
        ("colour", "unknown argument 'colour': the arguments are model, constraints, args, train_dataset, "),
    ],
)
def test_an_argument_of_another_trainer_is_answered_with_ours(name: str, told: str) -> None:
    """Before anything else, also where an argument is missing because it was given by the other name."""
    with pytest.raises(UserError, match=re.escape(told)):
        CDPGTrainer("no-such-model", **{name: 1})
    with pytest.raises(UserError, match=r"'reward_funcs'.*; unknown argument 'colour'"):
        CDPGTrainer("no-such-model", reward_funcs=len, colour=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'constraints'"):
        CDPGTrainer("no-such-model")  # type: ignore[call-arg]


def test_answers_name_what_there_is() -> None:
    arguments = inspect.signature(CDPGTrainer).parameters
    known = {
        *OWN,
        *arguments,
        "from_pretrained",
        "chat_template",
        "push_to_hub",
        "repo_id",
        "set_float32_matmul_precision",
    }
    known |= {"resume_from_checkpoint", "WANDB_NAME", "REPO_ID", "redirect_stderr"}
    names = [name for group, _ in ANSWERS for name in group.split()]
    assert len(set(names)) == len(names), "a name has one answer"
    assert not {*names, *FAMILIES} & set(FIELDS), "a setting needs none"
    for text in [*(text for _, text in ANSWERS), *FAMILIES.values()]:
        assert set(re.findall(r"\w+_\w+", text)) <= known, text
        assert "\n" not in text and not text.endswith("."), "one part of a sentence"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("logging_steps", "every epoch is logged"), ("activation_offloading", "use tokens_per_pass"),
        ("temperature", "samples are drawn at temperature 1"), ("weight_decay", "Adam without weight decay"),
        ("eval_strategy", "use evaluate_every"), ("vllm_gpu_memory_utilization", "use engine_memory"),
        ("model", "pass the model to CDPGTrainer"), ("evaluate_evry", "did you mean 'evaluate_every'?"),
        ("colour", "cdpg settings lists all settings"),
        ("checkpointing", "cdpg settings lists all settings"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_in_one_sentence(name: str, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        CDPGConfig(**{name: 1})


def test_the_command_lists_the_settings() -> None:
    shown = CliRunner().invoke(app, ["settings"]).output
    assert re.findall(r"^│ (\w+) ", shown, re.MULTILINE) == list(FIELDS)
    some = CliRunner().invoke(app, ["settings", "keep_"]).output
    assert re.findall(r"│ (keep_\w+) +│ (\S+) +│ How many of the latest", some) == [("keep_checkpoints", "2")]
    assert isinstance(CliRunner().invoke(app, ["settings", "colour"]).exception, UserError)


def test_settings_round_trip() -> None:
    config = CDPGConfig(report_to=("tensorboard",), batch_size=8, learning_rate=3e-7)
    assert CDPGConfig.from_mapping(config.to_mapping()) == config


def test_yaml_files(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("learning_rate: 1e-5\n", encoding="utf-8")
    assert CDPGConfig.from_mapping(read_yaml(path)).learning_rate == 1e-5
    path.write_text("", encoding="utf-8")
    assert read_yaml(path) == {}
    for text, message in (
        ("- a\n- b\n", "name: value"),
        ("a: [", "not valid YAML"),
        ("a: !!python/name:os.system", "YAML"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            read_yaml(path)


def test_overrides_win() -> None:
    assert parse_overrides(["epochs=3", "report_to=[a, b]", "output_dir=x=y"]) == {
        "epochs": 3,
        "report_to": ["a", "b"],
        "output_dir": "x=y",
    }
    with pytest.raises(UserError, match="key=value"):
        parse_overrides(["epochs"])


def test_what_is_read_is_the_readers_own(tmp_path: Path) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text("constraint: [a, b]\n", encoding="utf-8")
    read_yaml(path)["constraint"].clear()
    assert read_yaml(path) == {"constraint": ["a", "b"]}


def test_a_job_is_a_file_overlaid_by_options_overlaid_by_set(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: a\ncontexts: b.csv\nconstraint: [m:f, m:g]\nepochs: 1\nseed: 1\nmethod: dpg\n")
    values = gather(path, {"model": "z", "epochs": 2, "contexts": None}, ["epochs=3"])
    job = Job.from_mapping(values)
    assert (job.model, job.contexts, job.constraint) == ("z", "b.csv", ("m:f", "m:g"))
    assert (job.settings.epochs, job.settings.seed, job.settings.method) == (3, 1, "dpg")
    missing = pytest.raises(UserError, match=r"contexts, constraint must be given, by --contexts, --constraint")
    with on_command_line(), missing:
        Job.from_mapping({"model": "a"})
    with pytest.raises(UserError, match="did you mean 'contexts'"):
        Job.from_mapping({"model": "a", "constraint": "m:f", "context": "b"})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("prompt_prefix", "summarize: "), ("prompt_prefix", ""), ("prompt_prefix", "# a"), ("prompt_column", "no"),
        ("model", "yes"), ("contexts", "[a]"), ("eval_contexts", "2024"),
    ],
)  # fmt: skip
def test_a_text_after_set_is_taken_literally(key: str, text: str) -> None:
    given = {"model": "m", "contexts": "c.csv", "constraint": "m:f"}
    job = Job.from_mapping(gather(None, given, [f"{key}={text}"]))
    assert getattr(job, key) == text


def test_a_text_setting_keeps_its_blanks_after_set() -> None:
    found = CDPGConfig.from_mapping(parse_overrides(["decoder_prefix=fra ", "output_dir=2024", " device =cpu"]))
    assert (found.decoder_prefix, found.output_dir, found.device) == ("fra ", "2024", "cpu")
    assert gather(None, {}, ["constraint=[m:f, m:g]"]) == {"constraint": ["m:f", "m:g"]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model: yes", 'model takes text, not True: in YAML, put it in quotes, model: "..."'),
        (
            "prompt_prefix: {summarize: }",
            "prompt_prefix takes text, not {'summarize': None}: in YAML, put it in quotes",
        ),
        ("task: 5", "task takes text, not 5"),
        ("preset: 5", "preset takes text, not 5"),
        ("output_dir: 2024", 'output_dir takes text, not 2024: in YAML, put it in quotes, output_dir: "..."'),
        ("decoder_prefix: no", "decoder_prefix takes text, not False: in YAML, put it in quotes"),
        ("constraint: 5", "constraint takes module:function, or a list of those, not 5: in YAML, put it in quotes"),
        ("constraint: {m: f}", "constraint takes module:function, or a list of those, not {'m': 'f'}"),
        ("constraint: [m:f, 5]", "constraint takes module:function, or a list of those, not ['m:f', 5]"),
    ],
)
@pytest.mark.parametrize("given", [{"model": "m", "contexts": "c", "constraint": "m:f"}, {"task": "code-pep8"}])
def test_what_is_no_text_in_a_file_is_refused(tmp_path: Path, line: str, message: str, given: dict[str, Any]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(line, encoding="utf-8")
    with pytest.raises(UserError) as error:
        Job.from_mapping({**given, **gather(path, {}, [])})
    assert message in str(error.value)


def test_what_is_no_text_is_reported_with_all_else() -> None:
    with pytest.raises(UserError, match=r"unknown setting 'epoch'.*; model takes text.*; contexts must be given"):
        Job.from_mapping({"model": True, "epoch": 3, "constraint": "m:f"})
