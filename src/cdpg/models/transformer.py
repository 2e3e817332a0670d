"""The common part of causal and seq2seq models: a prompt is encoded once, and any number of rows continue it.

A *prefix* (the prompt of a causal model; the encoder's output and the decoder's start token of a seq2seq model) is run
once for each context and leaves a key-value cache. Rows select their context's cache and extend it: by one token at a
time when sampling, by all their tokens at once when scoring, with or without gradient.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cdpg.config import CDPGConfig
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.models import sharding
from cdpg.models.base import Decoding, LanguageModel, PromptTokens, Rows, TokenScores
from cdpg.models.codec import Codec
from cdpg.models.fast.attention import SharedAttention
from cdpg.models.fast.cache import RowLayer, Shared
from cdpg.models.fast.families import steps_of
from cdpg.models.fast.packed_weights import packed_weights, packing_works
from cdpg.models.fast.steps import StepDecoding, Steps, advance_together
from cdpg.models.head import VocabularyHead, chosen_log_probs
from cdpg.models.modules import inner_model
from cdpg.models.narrow import NarrowLayers
from cdpg.models.recomputing import recomputed
from cdpg.models.saving import plain_sampling, saved_as, saved_by
from cdpg.models.state import State
from cdpg.system.distributed import Processes

_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "attention_window", "window_size")
"""Settings by which model families limit how far back a position attends."""
_REMEMBERED = 2**14
"""Tokens of prompts whose keys and values may be held until they are started again."""


class TransformerModel(LanguageModel):
    """A Hugging Face model with a language-model head, dropout off."""

    has_adapters: bool
    """Whether only new adapters are trained, and the base is the same model with adapters off."""
    original_dtype: torch.dtype | None = None
    """The type of the weights before they were loaded for training; None if it is not known."""
    shares_prompts: bool
    """Whether rows attend to their context's prompt where it is stored, once; else it is copied to every row."""
    packs_weights: bool
    """Whether sampling on a CPU multiplies by packed weights; else by the weights as they are."""
    has_steps: bool
    """Whether the decoder's step is done in fewer operations while sampling; else by the model's own code."""
    _steps: Steps | None = None
    """Made for the present weights, while sampling."""
    _prefixes: dict[tuple[PromptTokens, ...], State] | None = None
    """The prompts that were started last, encoded, while they are remembered."""
    recomputes: bool = False
    """Whether layers keep no activations for the gradient, but compute them again in the backward pass."""
    lockstep: sharding.Lockstep | None = None
    """Set if the weights are divided among the processes, which then run the model together."""
    _narrow: NarrowLayers | None = None
    """Set if layers are stored in a narrow type."""
    _blueprint: nn.Module | None = None
    """The model without weights, to save a divided one."""

    def __init__(self, module: nn.Module, codec: Codec, dtype: torch.dtype, own_adapters: bool) -> None:
        self.codec, self.end_ids, self.dtype, self.has_adapters = codec, codec.end_ids, dtype, own_adapters
        self._attach(module)
        self._probing = True  # in the weights' own precision, so that results can be compared
        with torch.no_grad():
            self._check_head()
            own = self._own_steps()
            self.shares_prompts = self._agrees(own, share=True)
            self.packs_weights = packing_works()
            self.has_steps = self.shares_prompts and self._steps_work(own)
        self._probing = False

    @property
    def tokenizer(self) -> Any:
        return self.codec.tokenizer

    def _attach(self, module: nn.Module) -> None:
        self.module = module.eval()
        self.inner: Any = inner_model(module)
        self.config = self.inner.config.get_text_config(decoder=True)
        self._shared_attention = SharedAttention(self.inner)
        self.head = VocabularyHead(self.inner)
        self.vocabulary, self.hidden_size = self.head.shape

    @abstractmethod
    def _prefill(self, prompts: Sequence[PromptTokens]) -> State:
        """Run each prompt's prefix once."""

    def _prefill_for_decoding(self, prompts: Sequence[PromptTokens]) -> State:
        """The same without a gradient; long prompts may be run a few at a time."""
        return self._prefill(prompts)

    @abstractmethod
    def _extend(self, state: State, tokens: Tensor) -> Tensor:
        """Append ``[row, token]`` tokens; ``[row, token, feature]`` states that predict what follows each."""

    @abstractmethod
    def _decoding_cache(self, prefix: Any, shared: Shared, capacity: int, share: bool) -> tuple[Any, list[RowLayer]]:
        """A cache for rows that continue a prefix, and its layers that grow with the rows."""

    @abstractmethod
    def _idle_runs(self) -> dict[str, Callable[[], Any]]:
        """A run of each part of the model on a single token, by the name that the part has in :meth:`_run`."""

    @abstractmethod
    def _check_head(self) -> None:
        """Compare the head with the model's own logits."""

    def encode(self, contexts: Sequence[Context], max_length: int) -> list[PromptTokens]:
        return self.codec.encode(contexts, max_length)

    def decode(self, prompt: PromptTokens, tokens: Sequence[int]) -> str:
        return self.codec.decode(prompt, tokens)

    def token_differences(
        self, base: TransformerModel, contexts: Sequence[Context], max_length: int, prompt: str = "held-out prompt"
    ) -> Iterator[str]:
        """Differences between this model's tokens and the base's, a clause each: neither could score the other.

        Both are to complete ``contexts`` by up to ``max_length`` tokens; ``prompt`` is what one of them is called.
        """
        yield from self.codec.differences(base.codec, contexts, max_length, prompt)
        if self.vocabulary != base.vocabulary:
            yield f"it predicts {self.vocabulary:,} tokens, the base {base.vocabulary:,}"

    def start(self, prompts: Sequence[PromptTokens], context: Tensor, max_length: int) -> Decoding:
        with self._decoding():
            state = self._prefix_of(prompts)
            return self._decode_after(state, context, max_length, self._can_share(state, max_length))

    @contextmanager
    def remembering_prompts(self) -> Iterator[None]:
        if self.lockstep is None:  # a divided model gathers its output layer when it encodes prompts
            self._prefixes = {}
        try:
            yield
        finally:
            self._prefixes = None

    def advance(self, decodings: Sequence[Decoding], tokens: Sequence[Tensor]) -> None:
        stepped = [decoding for decoding in decodings if isinstance(decoding, StepDecoding)]
        if len(stepped) < len(decodings):
            return super().advance(decodings, tokens)
        advance_together(stepped, tokens)

    def _prefix_of(self, prompts: Sequence[PromptTokens]) -> State:
        if self._prefixes is None or sum(map(len, prompts)) > _REMEMBERED:
            return self._prefill_for_decoding(prompts)
        key = tuple(prompts)
        if key not in self._prefixes:
            self._prefixes.clear()
            self._prefixes[key] = self._prefill_for_decoding(prompts)
        return self._prefixes[key]

    def _decode_after(self, prefix: State, context: Tensor, max_length: int, share: bool) -> Decoding:
        if not share or self._steps is None:
            return _TransformerDecoding(self, prefix, context, max_length, share)
        shared = Shared.of(context, prefix.mask)
        state = self._steps.begin(prefix.cache, shared, prefix.lengths[context])
        return StepDecoding(self._steps, prefix.hidden[context], state)

    @contextmanager
    def sampling(self, rows: int) -> Iterator[None]:
        if self.lockstep is not None:
            with self.lockstep.stage():
                yield
            return
        if not self.exact_sampling:
            yield
            return
        steps = steps_of(self.inner, rows, self.packs_weights) if self.has_steps else None
        used = self.module if steps is None else self.inner.get_output_embeddings()
        with packed_weights(used, rows) if self.packs_weights else nullcontext():
            self._steps = steps
            try:
                yield
            finally:
                self._steps = None

    def in_step(self) -> AbstractContextManager[None]:
        return nullcontext() if self.lockstep is None else self.lockstep.stage()

    def gradient_passes(self, passes: int) -> AbstractContextManager[None]:
        return nullcontext() if self.lockstep is None else self.lockstep.gradient(passes, self._idle_loss)

    def backward(self, loss: Tensor) -> None:
        loss.backward() if self.lockstep is None else self.lockstep.backward(loss)

    def narrow_layers(self, dtype: torch.dtype) -> None:
        """Store the layers' weights in a narrow type; they are computed with in the present one."""
        self._narrow = NarrowLayers(sharding.repeated_blocks(self.module), dtype, self.inner.dtype)

    def shard(self, device: torch.device, processes: Processes) -> None:
        """Divide the weights among the processes; this process's part is moved to the device."""
        self._blueprint = sharding.without_weights(self.module)
        if self._narrow is not None:  # layers that are narrow are widened when they are gathered
            self._narrow.leave_widening()
        sharding.divide(self.module, device, processes, None if self._narrow is None else self._narrow.wide)
        self.lockstep = sharding.Lockstep(self.module, self._idle_runs(), processes)

    def gathered(self, keep: bool) -> TransformerModel | None:
        if self._blueprint is None:
            return self if keep else None
        self.module.zero_grad()  # whole weights take the memory of the gradients
        module = sharding.with_weights(self._blueprint, self.module, keep)
        if module is None:
            return None
        twin = copy.copy(self)
        twin.lockstep = twin._blueprint = None
        twin._attach(module)
        return twin

    def logits(self, hidden: Tensor) -> Tensor:
        with self._precision():
            logits = self.head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def score(self, prompts: Sequence[PromptTokens], rows: Rows) -> TokenScores:
        rows = Rows(*(tensor.to(self.device) for tensor in (rows.context, rows.tokens, rows.lengths)))
        mask = rows.mask
        with self._precision(), self._recomputing():
            state = self._prefill(prompts)
            if self.lockstep is not None and self.lockstep.differentiates:
                self.lockstep.postpone(state.cut())
            state.select(rows.context)
            hidden = state.hidden[:, None]
            if rows.tokens.shape[1] > 1:
                hidden = torch.cat([hidden, self._extend(state, rows.tokens[:, :-1])], dim=1)
            elif self.lockstep is not None and self.lockstep.differentiates:
                # Other processes have longer rows, and all must run and differentiate the same layers.
                hidden = hidden + 0.0 * self._extend(state, rows.tokens)
            chosen = chosen_log_probs(self.head, hidden[mask], rows.tokens[mask], self.vocabulary)
        log_probs = chosen.new_zeros(mask.shape).masked_scatter(mask, chosen)
        return TokenScores(log_probs=log_probs, hidden=hidden, mask=mask)

    def save(self, path: Path, config: CDPGConfig) -> None:
        """Write a plain Hugging Face folder; adapters are merged into the weights, and also saved in ``adapter``.

        The generation settings are those of plain sampling (see :mod:`cdpg.models.saving`).
        """
        module: Any = self.module
        if hasattr(module, "merge_and_unload"):
            module.save_pretrained(path / "adapter")
            module = copy.deepcopy(module).merge_and_unload()
        inner = inner_model(module)
        settings = plain_sampling(inner, self.tokenizer, self.end_ids, config.max_completion_length)
        with saved_by(inner, settings), saved_as(inner, self.saved_dtype(config)):
            module.save_pretrained(path)
        self.codec.tokenizer.save_pretrained(path)

    def saved_dtype(self, config: CDPGConfig) -> torch.dtype:
        """The type that the weights are saved in: that of training, or on request the original one."""
        trained: torch.dtype = self.inner.dtype
        return self.original_dtype or trained if config.save_dtype == "original" else trained

    def frozen_copy(self, original: nn.Module | None = None) -> TransformerModel:
        """A copy whose weights are not trained; ``original`` is a module to use instead of a copy."""
        twin = copy.copy(self)
        module = copy.deepcopy(self.module) if original is None else original
        twin._attach(module.requires_grad_(False))
        return twin

    @property
    def exact_sampling(self) -> bool:
        return self.dtype in (torch.float32, torch.float64)

    def as_base(self) -> AbstractContextManager[None]:
        return self.module.disable_adapter() if self.has_adapters else nullcontext()  # type: ignore[operator]

    def _attention(self, share: bool) -> AbstractContextManager[None]:
        """Context in which the model attends through the shared cache, if ``share`` is set."""
        return self._shared_attention() if share else nullcontext()

    def _can_share(self, state: State, max_length: int) -> bool:
        """Whether rows may share the prompt's cache: not if a local window would exclude part of it."""
        windows = [getattr(self.config, name, None) for name in _WINDOWS]
        shortest = min((window for window in windows if window), default=None)
        return self.shares_prompts and (shortest is None or state.mask.shape[1] + max_length <= shortest)

    def _own_steps(self) -> Tensor:
        """States of a short trial by the model's own attention."""
        try:
            return self._try_steps(share=False)
        except Exception as error:
            raise UserError(
                f"models of type {self.config.model_type!r} cannot be decoded step by step from a key-value cache "
                f"({type(error).__name__}: {error}): use a model of another type"
            ) from error

    def _agrees(self, own: Tensor, share: bool) -> bool:
        """Whether another way of decoding gives the states that the model's own gives."""
        try:
            return torch.allclose(self._try_steps(share), own, rtol=1e-3, atol=1e-4)
        except Exception:  # another kind of attention: prompts are copied
            return False

    def _steps_work(self, own: Tensor) -> bool:
        """Whether there is a step in fewer operations for this model, and it does what the model's own does."""
        try:
            self._steps = steps_of(self.inner, 3, self.packs_weights)
            return self._steps is not None and self._agrees(own, share=True)
        except Exception:  # a later version of the family may have other modules
            return False
        finally:
            self._steps = None

    def _try_steps(self, share: bool) -> Tensor:
        """States after some steps from two prompts of different length."""
        context = torch.tensor([0, 1, 1], device=self.device)
        decoding = self._decode_after(self._prefill([(0, 1), (1,)]), context, 2, share)
        for _ in range(2):
            decoding.advance(torch.zeros_like(context))
        return decoding.hidden

    def _recomputing(self) -> AbstractContextManager[None]:
        if not self.recomputes or not torch.is_grad_enabled():
            return nullcontext()
        return recomputed(sharding.repeated_blocks(self.inner))

    def _run(self, name: str, part: Any, **inputs: Any) -> Any:
        """Run a part of the model; the processes run a divided one together."""
        return part(**inputs) if self.lockstep is None else self.lockstep.run(name, partial(part, **inputs))

    def _idle_loss(self) -> Tensor:
        """A loss that depends on all weights, of a completion of two tokens."""
        rows = Rows(torch.tensor([0]), torch.tensor([[0, 0]]), torch.tensor([2]))
        return self.score([(0,)], rows).log_probs.sum()

    def _precision(self) -> AbstractContextManager[Any]:
        if self.exact_sampling or self._probing:
            return nullcontext()
        # Cached casts of divided weights would stay while the weights themselves are freed.
        cached = {} if self.lockstep is None else {"cache_enabled": False}
        return torch.autocast(self.device.type, dtype=self.dtype, **cached)

    @contextmanager
    def _decoding(self) -> Iterator[None]:
        """Context of a step of decoding."""
        # Weights that are gathered in inference mode could not be used for a gradient later.
        plain = self.lockstep is not None
        with (
            torch.inference_mode(False) if plain else nullcontext(),
            torch.no_grad() if plain else nullcontext(),
            self._precision(),
        ):
            yield


class _TransformerDecoding(Decoding):
    """Decoding for sampling: caches are written in place; the prompt's is shared if the attention allows it."""

    def __init__(self, model: TransformerModel, prefix: State, context: Tensor, max_length: int, share: bool) -> None:
        self.model, self.share = model, share
        self.shared = Shared.of(context, prefix.mask)
        cache, self.layers = model._decoding_cache(prefix.cache, self.shared, max_length, share)
        self.state = State(prefix.hidden[context], cache, prefix.mask[context], prefix.lengths[context])
        self.hidden = self.state.hidden

    def advance(self, tokens: Tensor) -> None:
        with self.model._decoding(), self.model._attention(self.share):
            self.hidden = self.state.hidden = self.model._extend(self.state, tokens[:, None])[:, -1]

    def keep(self, rows: Tensor) -> None:
        for layer in self.layers:
            layer.keep(rows)
        self.shared.keep(rows)
        self.state.take(rows)
        self.hidden = self.state.hidden
