"""Samples of the ideal model for a run, by its tuned model and the base and constraint that ``config.yaml`` names."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdpg.config import CDPGConfig, read_yaml
from cdpg.constraints.named import load_constraint
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.jobs.factors import with_multipliers
from cdpg.jobs.job import Job, missing_inputs, prompting
from cdpg.messages.terms import for_caller
from cdpg.models.names import locate, require_model
from cdpg.storage.json_files import mapping
from cdpg.storage.run_folder import RunFolder
from cdpg.tasks import find_task

if TYPE_CHECKING:  # torch is loaded when everything that can be wrong without it has been looked at
    from cdpg.rollout.exact import ExactSampler

_log = logging.getLogger(__name__)

SETTINGS = (
    *("max_completion_length", "decoder_prefix", "long_contexts", "device", "dtype", "chat", "system"),
    *("check_workers", "check_seconds", "check_memory", "check_output", "rows_per_pass", "tokens_per_pass"),
)
"""Settings of a run that drawing and judging depend on."""


@dataclass(frozen=True)
class TunedRun:
    """A run that a command has made, with all that samples of its ideal model need; nothing is loaded yet."""

    folder: RunFolder
    values: Mapping[str, Any]
    """Those of its ``config.yaml``."""
    base: str
    constraints: Sequence[Any]

    @classmethod
    def read(cls, path: str | Path) -> TunedRun:
        """The run in a folder; an error if its base or its constraint is missing."""
        folder = RunFolder(path)
        values = _values(folder)
        job = Job.from_mapping(values)
        constraints = with_multipliers([*map(_constraint, job.constraint), *_factors(job)], folder)
        for model in (str(folder.model), locate(job.model)):
            require_model(model)
        return cls(folder, values, job.model, constraints)

    def context(self, text: str) -> Context:
        """A text in the form of the run's contexts: with its prefix, and with the column that its task adds."""
        prefix, _ = prompting(self.values)
        text = text.removeprefix(prefix)
        if self.values.get("task") is None:
            return Context(prefix + text, {}, 1)
        task = find_task(str(self.values["task"]))
        return task.contexts([{task.column: text}], prefix)[0]

    def sampler(self, args: CDPGConfig | None = None) -> ExactSampler:
        """Load both models; ``args`` replace the run's own settings. Another base than the run's is reported."""
        from cdpg.rollout.exact import ExactSampler
        from cdpg.storage.provenance import weights_digest

        config = args or CDPGConfig.from_mapping({key: self.values[key] for key in SETTINGS if key in self.values})
        stop = prompting(self.values)[1]
        sampler = ExactSampler(str(self.folder.model), self.base, self.constraints, config, stop=stop)
        then = mapping(self.values.get("origin")).get("base")
        # The digest of a narrow base is of other weights; here the base is read as it is.
        types = (self.values.get("dtype"), self.values.get("base_dtype", "float32"))
        comparable = then is not None and types == (config.dtype, "float32")
        if comparable and weights_digest(sampler.base.module) != then:
            _log.warning(
                f"the weights of the base {self.base!r} are not those that the run started from: accepted samples "
                "follow the present base"
            )
        return sampler


def _values(folder: RunFolder) -> dict[str, Any]:
    if not folder.config.is_file():
        raise UserError(
            f"{str(folder.path)!r} is not a run's folder, and samples of the ideal model need the base and the "
            f"constraint that a run's {folder.config.name} names: give the folder of a run, or use cdpg.ExactSampler "
            "in Python"
        )
    values = read_yaml(folder.config)
    if not folder.model.is_dir():
        raise UserError(f"the run {str(folder.path)!r} has no model yet: it is written at the end")
    if values.get("task") is None and missing_inputs(values):
        raise UserError(
            f"{str(folder.config)!r} does not name the base and the constraint, since the run was started in Python: "
            "use cdpg.ExactSampler there"
        )
    return values


def _factors(job: Job) -> list[Any]:
    with _explained():
        return job.factors()


def _constraint(name: str) -> Any:
    with _explained():
        return load_constraint(name)


@contextmanager
def _explained() -> Iterator[None]:
    """Say why a function is needed that cannot be imported."""
    try:
        yield
    except UserError as error:
        what = for_caller("--exact judges samples", "samples of the ideal model are judged")
        raise UserError(f"{what} by the run's constraint, and {error}; start in the folder that has it") from error
