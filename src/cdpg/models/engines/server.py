"""A client for a vLLM server, over HTTP.

Completions are those of ``/v1/completions``. Weights are written to a folder that the server sees as well, and loaded
by its workers, through ``/collective_rpc``, which a server has if it was started with ``VLLM_SERVER_DEV_MODE=1``. Then
the keys and values of earlier prompts are dropped (``/reset_prefix_cache``).
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from cdpg.errors import CDPGError, RunError, UserError
from cdpg.messages.terms import term
from cdpg.messages.text import plain_text
from cdpg.models.engines.vllm import SAMPLING, Completion, Wanted
from cdpg.models.engines.worker import METHOD

AT_ONCE = 64
"""Requests that are under way at the same time; the server works on all of them together."""
_TRIES, _PAUSE = 20, 0.5
"""How often clearing the cache of prompts is tried, which fails while a request is under way; seconds between."""

HOW_TO_START = (
    "start one with VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --generation-config vllm, FOLDER being the model that is "
    "tuned"
)


@dataclass(frozen=True)
class Server:
    """A vLLM server at an address."""

    url: str
    seconds: float
    """Seconds to wait for one request."""
    model: str
    """The name that it serves its model by."""

    @classmethod
    def at(cls, url: str, seconds: float, window: int) -> Server:
        """The server at an address, if it serves one model with a window of at least ``window`` tokens."""
        url = url.rstrip("/")
        asking = cls(url, seconds, "")
        try:
            served = asking._ask("/v1/models")["data"]
        except RunError as error:
            raise UserError(f"{error}; {HOW_TO_START}") from error
        own = [model for model in served if not model.get("parent")]
        if len(own) != 1:
            raise UserError(f"the engine at {url} serves {len(served)} models, and one was expected; {HOW_TO_START}")
        longest = own[0].get("max_model_len")
        if longest is not None and longest < window:
            raise UserError(
                f"the engine at {url} has a window of {longest} tokens, and the longest prompt with its completion "
                f"takes {window}: start it with --max-model-len {window} or more, or lower max_completion_length"
            )
        asking._require_dev_mode()
        return cls(url, seconds, str(own[0]["id"]))

    def complete(self, wanted: Sequence[Wanted]) -> Iterator[list[Completion]]:
        """The completions of each prompt, in order; many prompts are under way at the same time."""
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            answers = [pool.submit(self._completions, one) for one in wanted]
            try:
                for answer in answers:
                    yield answer.result()
            finally:
                for answer in answers:
                    answer.cancel()

    def load(self, folder: str, version: str) -> None:
        """Load the weights of a folder that the server sees, too."""
        try:
            self._load(folder)
        except RunError as error:
            raise RunError(
                f"{error}; it could not load the weights in {folder!r}: it must serve the model that is tuned and see "
                "this folder under the same name (engine_folder)"
            ) from error
        self._forget_prompts()
        self._ask("/update_weight_version", {"new_version": version}, missing={})

    def _load(self, folder: str) -> None:
        """By the method that ``LoadsWeights`` adds to vLLM's workers, or by vLLM's own if the server was started
        without it."""
        try:
            self._ask("/collective_rpc", {"method": METHOD, "kwargs": {"weights_path": folder}})
        except RunError:
            self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})

    def version(self) -> str | None:
        """The version of its weights; None from a server that keeps none."""
        found = self._ask("/weight_info", missing={}).get("weight_version")
        return None if found is None else str(found)

    def close(self) -> None:
        """Nothing to do: the server keeps running."""

    def _completions(self, wanted: Wanted) -> list[Completion]:
        answer = self._ask(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": list(wanted.prompt),
                "n": wanted.count,
                "max_tokens": wanted.max_tokens,
                "seed": wanted.seed,
                "stop_token_ids": list(wanted.end_ids),
                "ignore_eos": True,  # those that end a completion are given: the model's own may be fewer
                "logprobs": 0,
                "return_token_ids": True,
                **SAMPLING,
            },
        )
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            drawn = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
            return [Completion(tuple(map(int, tokens)), tuple(map(float, values))) for tokens, values in drawn]
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"the engine at {self.url} gave no token ids with log-probabilities ({type(error).__name__}: {error}): "
                "use vLLM 0.10 or newer"
            ) from error

    def _require_dev_mode(self) -> None:
        """Refuse a server whose weights cannot be changed, before anything is loaded or drawn."""
        try:
            self._ask("/reset_prefix_cache", {})
        except RunError as error:
            raise UserError(f"{error}; its weights cannot be changed: {HOW_TO_START}") from error

    def _forget_prompts(self) -> None:
        for _ in range(_TRIES):
            if self._ask("/reset_prefix_cache", {}).get("success", True):
                return
            time.sleep(_PAUSE)
        raise RunError(
            f"the engine at {self.url} did not clear its cache of prompts, since another program uses it at the same "
            "time: let it serve this run alone"
        )

    def _ask(
        self, path: str, body: Mapping[str, Any] | None = None, missing: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The answer to a request, as JSON; ``missing`` for a path that the server does not have."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as response:
                text = response.read()
            found = json.loads(text) if text.strip() else {}
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing is not None:
                return missing
            raise RunError(f"the engine at {self.url} refuses {path}: {_reason(error)}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._unreachable(path, error) from error
        if not isinstance(found, dict):
            raise RunError(f"the engine at {self.url} answers {path} with a {type(found).__name__}, not with an object")
        return found

    def _unreachable(self, path: str, error: Exception) -> CDPGError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, (socket.timeout, TimeoutError)):
            return RunError(
                f"the engine at {self.url} did not answer {path} within {self.seconds:g} seconds: raise "
                f"engine_seconds, and continue with {term('resume')}"
            )
        return RunError(
            f"the engine at {self.url} cannot be reached ({plain_text(str(reason))}): start it again, and continue "
            f"with {term('resume')}"
        )


def _reason(error: urllib.error.HTTPError) -> str:
    """What the server says, or its status."""
    try:
        content = json.loads(error.read())
        said = content.get("error", content.get("detail", content))
        said = said.get("message", said) if isinstance(said, dict) else said
    except (OSError, ValueError, AttributeError):
        said = error.reason
    return f"{error.code} {plain_text(str(said))}"
