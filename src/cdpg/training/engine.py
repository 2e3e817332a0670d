"""Sets up the engine of a run, and sends it the weights to sample with."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from cdpg.config import CDPGConfig
from cdpg.errors import CDPGError, RunError, UserError
from cdpg.models.base import LanguageModel, PromptTokens
from cdpg.models.causal import CausalModel
from cdpg.models.engines.local import Local
from cdpg.models.engines.server import Server
from cdpg.models.engines.vllm import Connection, VLLMEngine
from cdpg.storage.atomic import cannot_write
from cdpg.system import files
from cdpg.system.distributed import Processes

T = TypeVar("T")

DRIFT = 0.1
"""If the log-probability of a tenth of the samples differs by more than this, in nats, there is a notice."""


class EngineLink:
    """An engine and the weights it has."""

    def __init__(self, connection: Connection, drawn_from: LanguageModel, folder: Path, processes: Processes) -> None:
        """``drawn_from`` is the model whose weights it gets, through ``folder``, which is this run's alone."""
        self._connection, self._drawn_from = connection, drawn_from
        self._folder, self._processes = folder, processes
        self._run = processes.from_main(uuid.uuid4().hex[:8])  # tells this run's weights from those of any other
        self._sent = ""
        vocabulary = drawn_from.vocabulary if isinstance(drawn_from, CausalModel) else 0
        self.engine = VLLMEngine(connection, drawn_from, vocabulary)

    def send(self, number: int, config: CDPGConfig) -> None:
        """Send the engine the model's weights after epoch ``number``, unless it has them; called by all processes."""
        version = f"{self._run}-{number}"
        if not self._in_main(lambda: self._is_missing(version)):
            return
        whole = self._drawn_from.gathered(keep=self._processes.is_main)
        plain = config.replace(save_dtype="trained")

        def send() -> None:
            assert whole is not None
            self._write(whole, plain)
            self._connection.load(str(self._folder.resolve()), version)

        self._in_main(send)
        self._sent = version

    def _write(self, model: LanguageModel, config: CDPGConfig) -> None:
        """Write a model to the folder. It is read at once and never again, so it need not be synced to the disk."""
        try:
            if self._folder.exists():
                files.remove_tree(self._folder)  # not overwritten: the engine may still have the old files open
            files.make_folder(self._folder)
            model.save(self._folder, config)
        except (OSError, SafetensorError) as error:
            raise cannot_write(self._folder, error) from error

    def require_unchanged(self) -> None:
        """Refuse samples that may have been drawn with other weights; all processes call it."""

        def check() -> None:
            if self._connection.version() not in (None, self._sent):
                raise RunError(
                    "another program has changed the engine's weights while it drew samples: let it serve this run "
                    "alone"
                )

        self._in_main(check)

    def close(self) -> None:
        """Close the connection, and remove the weights in the folder."""
        self._connection.close()
        self._sent = ""
        if self._processes.is_main and self._folder.exists():
            files.discard(self._folder)

    def _is_missing(self, version: str) -> bool:
        return self._sent != version or self._connection.version() not in (None, version)

    def _in_main(self, work: Callable[[], T]) -> T:
        """The main process's result, on every process; if the main process fails, all of them fail."""
        found: list[T] = []
        problem: CDPGError | None = None
        if self._processes.is_main:
            try:
                found = [work()]
            except CDPGError as error:
                problem = error
        found = self._processes.from_main(found)
        if not found:
            raise problem or RunError("the main process could not use the engine")
        return found[0]


def make_engine(
    config: CDPGConfig,
    drawn_from: LanguageModel,
    prompts: Sequence[PromptTokens],
    processes: Processes,
    folder: Path,
    shares_adapters: bool,
) -> EngineLink | None:
    """The engine that the settings ask for; None if the model itself draws.

    ``shares_adapters``: it would sample the base, which is the policy with its adapters off.
    """
    if config.engine == "transformers":
        return None
    if not isinstance(drawn_from, CausalModel):
        raise UserError(
            f"engine is {config.engine!r}, which is for decoder-only models of Transformers, and this is a "
            f"{type(drawn_from).__name__}: set engine: transformers"
        )
    if shares_adapters:
        raise UserError(
            f"engine is {config.engine!r} and the samples are drawn from the base, which with adapters has no weights "
            "of its own: set proposal: policy, or engine: transformers"
        )
    if config.base_dtype == "int8" and any(
        parameter.dtype == torch.int8 for parameter in drawn_from.module.parameters()
    ):
        raise UserError(
            f"engine is {config.engine!r} and the samples are drawn from the base, whose layers are stored in 8 bits "
            "in a way that an engine cannot read: set base_dtype to bfloat16 or float32, or engine: transformers"
        )
    window = max(map(len, prompts), default=1) + config.max_completion_length
    connection: Connection
    if config.engine_url:
        connection = Server.at(config.engine_url, config.engine_seconds, window)
    elif processes.count > 1:
        raise UserError(
            f"engine is {config.engine!r} and there are {processes.count} processes, each of which would start its "
            "own: start one server and set engine_url"
        )
    else:
        connection = Local(config, window, drawn_from.device.type == "cpu")
    if config.engine_folder:  # it may hold other things: what is written there is replaced and removed
        folder = Path(config.engine_folder) / processes.from_main(f"cdpg-{uuid.uuid4().hex[:8]}")
    return EngineLink(connection, drawn_from, folder, processes)


class DriftWatch:
    """Warns once if the engine's log-probabilities and ours differ by too much."""

    def __init__(self) -> None:
        self._warned = False

    def warning(self, record: Mapping[str, Any]) -> str | None:
        """The warning after an epoch with these metrics, or None."""
        low, high = record.get("engine_log_ratio_low"), record.get("engine_log_ratio_high")
        if self._warned or low is None or high is None or max(-low, high) <= DRIFT:
            return None
        self._warned = True
        return (
            f"epoch {record['epoch']}: the engine's log-probabilities of samples differ from those computed here, for "
            f"a tenth of them by more than {DRIFT} (quantiles 5% {low:.3g}, 50% "
            f"{record['engine_log_ratio_median']:.3g}, 95% {high:.3g}): the importance weights use the engine's and "
            "stay right; for the policy's precision, start it with --dtype float32"
        )

    def verdict(self, records: Sequence[Mapping[str, Any]]) -> str | None:
        """Nothing more at the end."""
        return None
