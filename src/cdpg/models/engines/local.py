"""vLLM inside this program, where it is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import util
from typing import Any

from cdpg.config import CDPGConfig
from cdpg.errors import RunError, UserError, first_line
from cdpg.models.engines.vllm import SAMPLING, Completion, Wanted
from cdpg.models.engines.worker import METHOD, LoadsWeights


class Local:
    """A vLLM in this process. It starts with the first weights; later ones are loaded into it."""

    def __init__(self, config: CDPGConfig, window: int, on_cpu: bool) -> None:
        if util.find_spec("vllm") is None:
            raise UserError(
                "engine is 'vllm', and vLLM is not installed here: install it (pip install vllm), or start a server "
                "elsewhere and set engine_url"
            )
        self._config, self._window, self._on_cpu = config, window, on_cpu
        self._llm: Any = None
        self._version: str | None = None

    def complete(self, wanted: Sequence[Wanted]) -> Iterator[list[Completion]]:
        """The completions of each prompt, in order; vLLM works on all together."""
        from vllm import SamplingParams

        settings = [
            SamplingParams(
                n=one.count, max_tokens=one.max_tokens, seed=one.seed, stop_token_ids=list(one.end_ids),
                ignore_eos=True, logprobs=0, detokenize=False, **SAMPLING,
            )
            for one in wanted
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": list(one.prompt)} for one in wanted]
        for output in self._llm.generate(prompts, settings, use_tqdm=False):
            drawn = sorted(output.outputs, key=lambda one: int(one.index))
            yield [Completion(tuple(one.token_ids), tuple(_chosen(one))) for one in drawn]

    def load(self, folder: str, version: str) -> None:
        """Load the weights of a folder, and clear the cache of prompts."""
        try:
            if self._llm is None:
                self._llm = self._start(folder)
            else:
                self._llm.collective_rpc(METHOD, kwargs={"weights_path": folder})
                if not self._llm.reset_prefix_cache():
                    raise RuntimeError("the cache of prompts, computed with earlier weights, could not be cleared")
        except Exception as error:  # of vLLM: any
            raise RunError(f"vLLM could not load the weights in {folder!r}: {first_line(error)}") from error
        self._version = version

    def version(self) -> str | None:
        """The version of its weights."""
        return self._version

    def close(self) -> None:
        """End it, and free its memory."""
        self._llm = None

    def _start(self, folder: str) -> Any:
        from vllm import LLM

        narrow = self._config.dtype == "bfloat16"
        own = {}
        if self._on_cpu:
            own["enable_chunked_prefill"] = False  # after a part of a prompt it rewinds a generator; a CPU's cannot
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # gigabytes; otherwise it takes half of the memory
        return LLM(
            model=folder,
            dtype="bfloat16" if narrow else "float32",
            max_model_len=self._window,
            seed=self._config.seed % 2**31,
            gpu_memory_utilization=self._config.engine_memory,
            enforce_eager=self._on_cpu,
            generation_config="vllm",  # its own settings, not the model's temperature
            worker_extension_cls=f"{LoadsWeights.__module__}.{LoadsWeights.__qualname__}",
            **own,
        )


def _chosen(output: Any) -> Iterator[float]:
    """The log-probability of each token that was drawn."""
    for token, log_probs in zip(output.token_ids, output.logprobs, strict=True):
        yield float(log_probs[token].logprob)
