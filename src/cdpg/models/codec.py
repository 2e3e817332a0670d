"""Converts contexts to token ids and token ids to text, for any Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerFast

from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.messages.terms import for_caller
from cdpg.models.base import PromptTokens

_ANCHOR = 8
"""Prompt tokens decoded along with a completion, so that its first word keeps the space before it."""


class Codec:
    """Encodes contexts as prompts that fit a model's window, and decodes completions."""

    def __init__(
        self,
        tokenizer: Any,
        end_ids: frozenset[int],
        window: int | None,
        seq2seq: bool,
        long_contexts: Literal["refuse", "cut"] = "refuse",
    ) -> None:
        self.tokenizer, self.end_ids, self.window, self.seq2seq = tokenizer, end_ids, window, seq2seq
        self.long_contexts = long_contexts
        self._anchor_text = lru_cache(maxsize=4096)(self._text)  # the same for all samples of a context

    def encode(self, contexts: Sequence[Context], max_length: int) -> list[PromptTokens]:
        """The prompts; a decoder-only model must fit ``max_length`` more tokens into the same window."""
        room = self.room(max_length)
        if room is not None and room < 1:
            raise UserError(
                f"max_completion_length is {max_length}, but the model's window is {self.window} tokens, prompt "
                f"included: lower max_completion_length"
            )
        prompts = [self._fit(self._ids(context), room) for context in contexts]
        self._refuse_long(contexts, prompts, room, max_length)
        return prompts

    def room(self, max_length: int) -> int | None:
        """Largest number of tokens of a prompt; None for no limit."""
        return None if self.window is None else self.window - (0 if self.seq2seq else max_length)

    @property
    def closes_texts(self) -> bool:
        """Whether the tokenizer adds an end token to every text; it is removed for a decoder-only model."""
        return not self.seq2seq and list(self.tokenizer("a").input_ids)[-1] in self.end_ids

    def differences(
        self, base: Codec, contexts: Sequence[Context], max_length: int, prompt: str = "held-out prompt"
    ) -> Iterator[str]:
        """Differences between this codec and the base's, a clause each; both encode ``contexts``.

        Windows may differ if the base's prompts fit into both.
        """
        if self.seq2seq != base.seq2seq:
            kinds = {True: "an encoder and a decoder", False: "a decoder alone"}
            yield f"it has {kinds[self.seq2seq]}, the base {kinds[base.seq2seq]}"
            return
        own, theirs = self.tokenizer.get_vocab(), base.tokenizer.get_vocab()
        if own != theirs:
            odd = sum(theirs.get(token) != number for token, number in own.items())
            missing = len(theirs.keys() - own.keys())
            yield (
                f"its tokenizer has {len(own):,} tokens, the base's {len(theirs):,}; {odd:,} of its own stand for "
                f"nothing or another id there, and {missing:,} of the base's are missing"
            )
            return
        if self.end_ids != base.end_ids:
            yield f"its texts end with token {_listed(self.end_ids)}, the base's with {_listed(base.end_ids)}"
        other = next((context for context in contexts if self._ids(context) != base._ids(context)), None)
        if other is not None:
            yield f"it reads the {prompt} of row {other.row} as other tokens"
        longest = max(map(len, base.encode(contexts, max_length)), default=0)
        needed = longest if self.seq2seq else longest + max_length
        if self.window is not None and needed > self.window:
            with_it = "" if self.seq2seq else " with its completion"
            taken = f"the longest {prompt} of the base takes {needed}{with_it}"
            yield f"its window is {self.window} tokens, and {taken}"

    def _refuse_long(
        self, contexts: Sequence[Context], prompts: list[PromptTokens], room: int | None, max_length: int
    ) -> None:
        long = [i for i, prompt in enumerate(prompts) if room is not None and len(prompt) > room]
        if not long:
            return
        others = f" (and {len(long) - 1:,} other rows)" if len(long) > 1 else ""
        window = f"the model's window of {self.window} tokens"
        limit = window if self.seq2seq else f"{room}, {window} less max_completion_length = {max_length}"
        raise UserError(
            f"row {contexts[long[0]].row}{others} does not fit: {len(prompts[long[0]])} tokens, at most {limit}; "
            f"shorten it, or set long_contexts: cut"
        )

    def _fit(self, ids: list[int], room: int | None) -> PromptTokens:
        if room is None or len(ids) <= room or self.long_contexts == "refuse":
            return tuple(ids)
        if not self.seq2seq:  # keep the end, which the completion continues, and the start token
            start = ids[:1] if ids[0] == self.tokenizer.bos_token_id and room > 1 else []
            return tuple(start + ids[len(start) - room :])
        special = {*self.end_ids, *self.tokenizer.all_special_ids}  # keep the special tokens at the end
        plain = next((place for place in range(len(ids), 0, -1) if ids[place - 1] not in special), 0)
        end = ids[max(plain, len(ids) - room) :]
        return tuple(ids[: room - len(end)] + end)

    def _ids(self, context: Context) -> list[int]:
        if isinstance(context.prompt, str):
            ids: list[int] = list(self.tokenizer(context.prompt)["input_ids"])
            # Some tokenizers add an end token to every text; a decoder-only model could not continue it.
            while not self.seq2seq and ids and ids[-1] in self.end_ids and not self._ends_itself(context.prompt):
                ids.pop()
        else:
            ids = self._chat_ids(context)
        if not ids:
            start = self.tokenizer.bos_token_id
            if start is None:
                raise UserError(f"row {context.row}: the prompt is empty and the tokenizer has no start token")
            ids = [start]
        return ids

    def _ends_itself(self, text: str) -> bool:
        plain = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return bool(plain) and plain[-1] in self.end_ids

    def _chat_ids(self, context: Context) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                f"row {context.row}: the prompt is a chat, but the tokenizer has no chat template: give prompts as "
                f"text, without {for_caller('--chat', 'chat=True')}, or use a chat model"
            )
        messages = [dict(message) for message in context.prompt if not isinstance(message, str)]
        answering = messages[-1]["role"] != "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answering, continue_final_message=not answering
            )
        except Exception as error:  # a template is a program and may raise anything
            raise UserError(f"row {context.row}: the model's chat template refuses the messages: {error}") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, prompt: PromptTokens, tokens: Sequence[int]) -> str:
        """The completion's text, as it continues the prompt's text."""
        size, known = len(self.tokenizer), tuple(tokens)
        if known and max(known) >= size:
            known = tuple(token for token in known if token < size)  # padded embeddings have ids without a token
        if self.seq2seq:
            return self._text(known)
        anchor = tuple(prompt[-_ANCHOR:])
        before, text = self._anchor_text(anchor), self._text(anchor + known)
        return text[len(before) :] if text.startswith(before) else self._text(known)

    def _text(self, ids: Sequence[int]) -> str:
        if _decodes_plainly(self.tokenizer):
            plain: str = self.tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=True)
            return plain
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _decodes_plainly(tokenizer: Any) -> bool:
    """Whether decoding without clean-up is what the fast tokenizer inside does; to ask that one takes half the time."""
    kind = type(tokenizer)
    return all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, kind) for name in ("decode", "_decode")
    )


def _listed(ids: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(ids))) or "none"
