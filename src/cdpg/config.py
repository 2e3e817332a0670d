"""The settings of a run: one frozen dataclass, each field documented beside it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import yaml

from cdpg.errors import UserError
from cdpg.messages.foreign_names import unknown_setting
from cdpg.values import convert, out_of_range

T = TypeVar("T")
S = TypeVar("S", bound="MethodSettings")


@dataclasses.dataclass(frozen=True)
class MethodSettings:
    """The settings of one method, if it has any: a subclass, with a default for each, each documented beside it.

    They are set and read as all others are: ``CDPGConfig(ziegler_beta=0.1).ziegler_beta``.
    """

    def problems(self) -> Iterable[str]:
        """A sentence for each setting whose value has the right type but is out of range."""
        return ()

    def idle(self) -> Mapping[str, str]:
        """The settings that have no effect beside the others, each with the reason."""
        return {}


def _answers_unknown_names(cls: type[T]) -> type[T]:
    """Report unknown names in Python as in YAML: with a suggestion, and together with all other problems."""
    plain = cls.__init__

    def init(self: T, /, *given: Any, **settings: Any) -> None:
        problems = [unknown_setting(key, FIELDS) for key in settings if key not in FIELDS]
        known = {key: value for key, value in settings.items() if key in FIELDS}
        vars(self).update({key: value for key, value in known.items() if key not in GENERAL})
        try:
            plain(self, *given, **{key: value for key, value in known.items() if key in GENERAL})
        except UserError as error:
            problems.append(str(error))
        if problems:
            raise UserError("; ".join(problems))

    setattr(cls, "__init__", init)  # noqa: B010 - an assignment is what mypy forbids
    return cls


@_answers_unknown_names
@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # these two count the methods' settings, too
class CDPGConfig:
    """Settings of a run, the same in Python, in YAML and after ``--set``.

    The settings of the methods are fields like the others; :func:`add_method` adds them.
    """

    output_dir: str = "runs/cdpg"
    """The run's folder: configuration, metrics, samples, checkpoints, the tuned model."""
    overwrite_output_dir: bool = False
    """Remove an earlier run from ``output_dir`` before a new one begins; other files stay. Resuming removes nothing."""
    method: str = "cdpg"
    """How the gradient is weighted."""
    epochs: int = 1000
    """Rounds of sampling, as in the paper; *not* passes over the data."""
    contexts_per_epoch: int = 32
    """N: contexts drawn in each epoch."""
    num_generations: int = 32
    """M: samples drawn for each context."""
    max_completion_length: int = 128
    """Longest completion, in tokens; a longer one is cut and judged like any other."""
    learning_rate: float = 1e-5
    """Adam's rate after the warm-up."""
    warmup_epochs: int | None = None
    """Epochs over which the rate rises linearly; by default 100 or a tenth of the epochs, the smaller. A run that is
    extended keeps the warm-up it began with."""
    decay_epochs: int = 0
    """Epochs at the end over which the rate falls linearly towards 0, which averages out noise; the paper does not do
    this."""
    partition_epsilon: float = 1e-8
    """ε, added once to the partition estimate in the weight's denominator; with moments, rewards or another
    ``divergence`` than KL(p, π) it is 0."""
    batch_size: int | None = None
    """Samples per optimiser step, over all processes; by default all N·M of the epoch."""
    max_grad_norm: float | None = None
    """Clip the gradient to this norm; by default it is not clipped."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Adam's two decay rates."""
    adam_epsilon: float = 1e-8
    """ε in Adam's denominator."""
    seed: int = 0
    """Seeds the order of the contexts, the samples and the shuffling."""

    chat: bool = False
    """Send every plain-text prompt as a user message, formatted with the model's chat template; constraints then get
    completions as lists of one message, as in TRL."""
    system: str = ""
    """The system message of every chat that has none."""
    long_contexts: Literal["refuse", "cut"] = "refuse"
    """What to do with a context that does not fit the model's window: refuse it by row, or cut it."""
    decoder_prefix: str = ""
    """Text every seq2seq output starts with, conditioned on and not scored (a target language such as ``fra_Latn``)."""
    trust_remote_code: bool = False
    """Let a hub model run its own code on this machine."""

    lora_rank: int | None = None
    """Tune adapters (LoRA) of this rank instead of all weights: the base needs no second copy, and Adam little memory.
    They need a larger ``learning_rate``, such as 1e-4."""
    lora_alpha: float | None = None
    """Adapters are scaled by this over their rank; by default it is twice the rank."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get adapters; by default all linear layers except the output layer."""

    check_workers: int | None = None
    """Worker processes that judge samples, for each training process; by default one for each core, at most 8,
    divided among the training processes of a machine. 0 judges in the training process itself, for a constraint that
    holds a model on a GPU: there nothing ends a call that hangs."""
    check_seconds: float = 10.0
    """Seconds that a constraint may take for one sample before its worker is killed and the sample counts as failed."""
    check_memory: int = 1024
    """Megabytes that a worker may use beyond what it had at its start."""
    check_failures: float = 0.05
    """The run stops if more than this share of an epoch's samples fails, or of the last 100 if an epoch has fewer."""
    check_output: Literal["hide", "show"] = "hide"
    """Whether to show a few lines of what a constraint prints in a worker; with ``check_workers`` 0 all of it is
    shown."""

    proposal: str | None = None
    """Which model draws the samples: ``policy``, ``base``, or a folder or hub id of a third model, which is not
    trained. The weights divide by the probability under the model that drew the sample, so that the gradient is right
    for any. By default it is the method's own: the policy, or the base for ``rft``."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Which program draws the training samples: this one (``transformers``), or vLLM, which is sent the weights. With
    vLLM, the importance weights use the log-probabilities that it reports."""
    engine_url: str = ""
    """Address of a vLLM server, such as ``http://localhost:8000``; without it, vLLM runs inside this program."""
    engine_folder: str = ""
    """Folder that vLLM reads weights from, which a server must see under the same name; by default ``engine`` in the
    run's folder."""
    engine_seconds: float = 600.0
    """Seconds that the engine may take for one request before the run stops."""
    engine_memory: float = 0.3
    """Share of the GPU's memory that vLLM may take inside this program."""
    sync_every: int = 1
    """Epochs after which the copy of the policy that draws the samples is renewed; with 1 it is always the present
    policy. With more, an engine is sent weights less often, and importance weights have more noise."""

    prune: bool = True
    """End a sample as soon as its constraint's function ``hopeless`` says that b is 0 whatever follows. Evaluations,
    and methods that need whole samples, draw them to their end."""

    keep: Literal["last", "best"] | None = None
    """Which model the run ends with: the last one, or the latest whose gain on the validation contexts is not below the
    largest by two standard errors. By default ``best`` for method ``cdpg`` if there are held-out and validation
    contexts, no moments or rewards, and ``divergence`` is ``kl``; else ``last``."""
    validation_contexts: int | None = None
    """Number of training contexts that are used for validation instead: the gain on them decides which model is kept
    and whether samples are replayed. They are not the held-out set. By default a tenth, at most 64, and none if there
    are fewer than 50; none either if nothing is to be decided. At least 5 of them must have a sample of the ideal
    model, else the last model is kept and nothing is replayed."""
    save_every: int = 100
    """Epochs between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    """How many of the latest checkpoints are kept."""
    save_dtype: Literal["trained", "original"] = "trained"
    """Type of the weights in ``model/``: the one they are trained in (float32, or float64 under ``dtype: float64``), or
    the one of the base, such as bfloat16, to which they are then rounded. Metrics are measured with the weights before
    rounding; adapters, in ``model/adapter``, are not rounded."""
    evaluate_every: int | None = None
    """Epochs between evaluations during the run, the first being of the base; by default a tenth of the epochs that the
    run began with. 0 leaves out all of them, and with them the curves of the report."""
    evaluate_at_end: bool = True
    """Evaluate the base and the tuned model on all held-out contexts at the end, whatever ``evaluate_every`` is."""
    evaluation_contexts: int = 64
    """Held-out contexts of the evaluations during the run; the final evaluation uses all of them."""
    evaluation_samples: int = 16
    """Samples drawn for each held-out context."""
    gain_draws: int = 32
    """Largest number of samples of the base that are drawn for each held-out or validation context, to find samples of
    the ideal model. The gain is measured on these. With 0 there is no gain: nothing is replayed, and the last model is
    kept."""
    moment_contexts: int = 256
    """Largest number of contexts for which samples of the base are drawn to fit λ of the target's moments."""
    moment_draws: int = 32
    """Largest number of samples of the base for each of them; with fewer contexts, more in proportion."""
    log_samples: int = 8
    """Samples written to ``samples.jsonl`` each epoch."""
    report_to: tuple[str, ...] = ()
    """Trackers, by Accelerate's names: ``tensorboard``, ``wandb``, ``mlflow`` and others."""

    device: str = "auto"
    """``auto``, ``cpu``, ``cuda``, ``mps``."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Precision of the computation; the tuned weights stay in float32 under bfloat16."""
    base_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Type that the layers of the frozen base are stored in; refused if this changes its log-probabilities by more than
    ``base_error``."""
    base_error: float = 0.01
    """Nats by which a narrow ``base_dtype`` may change the log-probability of a sample, measured before the run; 0.01
    changes weights by 1 %."""
    sharding: Literal["none", "full"] = "none"
    """``full`` divides weights, gradients and Adam's moments among the processes (FSDP2), layer by layer."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers for the gradient, and compute the rest again: less memory, more time."""
    process_seconds: float = 1800.0
    """Seconds that a process waits for the others before the run ends, as when the network between them is down."""
    rows_per_pass: int = 256
    """Sequences sampled in parallel: more is faster, and needs more memory."""
    tokens_per_pass: int = 1280
    """Tokens scored or differentiated at once: memory grows with this, hardly with N·M."""

    def __post_init__(self) -> None:
        """Convert every value to the type of its setting, or raise one error for all invalid values."""
        problems = []
        for key, expected in FIELDS.items():
            try:
                object.__setattr__(self, key, convert(key, getattr(self, key), expected))
            except UserError as error:
                problems.append(str(error))
        problems = problems or list(out_of_range(self, METHOD_SETTINGS))
        if problems:
            raise UserError("; ".join(problems))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> CDPGConfig:
        """Settings by name, as YAML gives them; every problem is reported at once."""
        return cls(**settings)

    @classmethod
    def of(cls, given: CDPGConfig | Mapping[str, Any] | None) -> CDPGConfig:
        """The trainer's ``args``: settings, a dictionary of them, or None for the defaults."""
        if isinstance(given, Mapping):
            return cls.from_mapping({str(key): value for key, value in given.items()})
        if not isinstance(given, cls | None):
            raise UserError(
                f"args is of type {type(given).__name__}: pass a CDPGConfig, or a dictionary of its settings such as "
                "{'output_dir': 'runs/mine', 'epochs': 50}"
            )
        return given or cls()

    def replace(self, **changes: Any) -> CDPGConfig:
        """A copy with some settings changed."""
        return dataclasses.replace(self, **changes)

    def __eq__(self, other: object) -> bool:
        return self.values() == other.values() if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.values().items()))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{key}={value!r}' for key, value in self.values().items())})"

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The settings of the methods."""

    def settings_of(self, kind: type[S]) -> S:
        """The settings of one method."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})

    def values(self) -> dict[str, Any]:
        """Every setting by its name, those of the methods last."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for YAML and JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.values().items()}

    @property
    def samples_per_epoch(self) -> int:
        return self.contexts_per_epoch * self.num_generations

    @property
    def warmup(self) -> int:
        """Epochs of warm-up, with the default applied."""
        return min(100, self.epochs // 10) if self.warmup_epochs is None else self.warmup_epochs

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch, counted from 1."""
        return self.learning_rate * self.rate_share(epoch)

    def rate_share(self, epoch: int) -> float:
        """The rate of an epoch, as a share of ``learning_rate``: linear rise, constant, linear fall."""
        rise = epoch / max(1, self.warmup)
        fall = (self.epochs + 1 - epoch) / (min(self.decay_epochs, self.epochs) + 1)
        return min(1.0, rise, fall)

    @property
    def evaluation_interval(self) -> int:
        """Epochs between evaluations, with the default applied; 0 for none."""
        return max(1, self.epochs // 10) if self.evaluate_every is None else self.evaluate_every

    @property
    def evaluates(self) -> bool:
        """Whether there is any evaluation, during the run or at its end."""
        return self.evaluation_interval > 0 or self.evaluate_at_end

    def evaluates_after(self, epoch: int) -> bool:
        """Whether the run evaluates after an epoch; epoch 0 stands for the base, before the first epoch."""
        interval = self.evaluation_interval
        return interval > 0 and (epoch % interval == 0 or epoch == self.epochs)


GENERAL: dict[str, Any] = typing.get_type_hints(CDPGConfig)
"""The settings that belong to no method, with their types."""
FIELDS: dict[str, Any] = dict(GENERAL)
"""Every setting with its type, those of the methods last."""
METHOD_SETTINGS: dict[str, type[MethodSettings]] = {}
"""Every method by its name, with the settings of its own; :mod:`cdpg.methods` fills it."""


def add_method(name: str, settings: type[MethodSettings]) -> None:
    """Make a method known, and its settings."""
    fields = typing.get_type_hints(settings)
    taken = [name] if name in METHOD_SETTINGS else [key for key in fields if key in FIELDS]
    if taken:
        raise ValueError(f"{', '.join(map(repr, taken))} is there already: choose other names for {name!r}")
    METHOD_SETTINGS[name] = settings
    FIELDS.update(fields)
    CDPGConfig.__annotations__.update(fields)
    for field in dataclasses.fields(settings):
        CDPGConfig.__dataclass_fields__[field.name] = field
        setattr(CDPGConfig, field.name, getattr(settings(), field.name))  # of settings that were made before, too
    _sign()


def remove_method(name: str) -> None:
    """Undo :func:`add_method`."""
    for key in typing.get_type_hints(METHOD_SETTINGS.pop(name)):
        del FIELDS[key], CDPGConfig.__annotations__[key], CDPGConfig.__dataclass_fields__[key]
        delattr(CDPGConfig, key)
    _sign()


def _sign() -> None:
    """Give the constructor a signature with all settings, which is what notebooks offer."""
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if field.name in GENERAL else inspect.Parameter.KEYWORD_ONLY,
            default=getattr(CDPGConfig, field.name),
            annotation=field.type,
        )
        for field in dataclasses.fields(CDPGConfig)
    ]
    setattr(CDPGConfig, "__signature__", inspect.Signature(parameters))  # noqa: B010 - an assignment is what mypy forbids


def read_yaml(path: Path) -> dict[str, Any]:
    """A configuration file as a mapping; an empty file is an empty mapping."""
    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the configuration file {str(path)!r}: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{str(path)!r} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{str(path)!r} must hold settings as 'name: value' lines, not a {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def parse_yaml(text: str) -> Any:
    """What a YAML text says. A command reads the configuration of a run several times, which is slow: 10 ms each."""
    return copy.deepcopy(_parsed(text))


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> Any:
    return yaml.safe_load(text)


def parse_overrides(pairs: Iterable[str], texts: Collection[str] = ()) -> dict[str, Any]:
    """``--set key=value`` pairs, each value read as YAML reads it.

    Text settings, and those in ``texts``, are taken literally, since YAML reads some texts as other types.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set takes key=value, not {pair!r}")
        key = key.strip()
        try:
            settings[key] = text if key in texts or FIELDS.get(key) is str else yaml.safe_load(text)
        except yaml.YAMLError:
            settings[key] = text
    return settings
