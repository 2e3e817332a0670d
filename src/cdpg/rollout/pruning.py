"""Ends a sample early if its beginning can no longer satisfy the constraint: b = 0 whatever follows.

The stopped sequences are a coarser set of outcomes, whose probabilities sum to 1 as well. A stopped sequence has P = 0,
like all sequences that begin with it. So the partition estimate, the weights and KL(p, π) are what they would be
without pruning. The expectation of (π/q) ∇log π over the drawn tokens is 0, as it is for whole sequences: log π is a
sum over tokens, whose gradients up to a stopping time are a martingale.

Where a sample ends depends on its own tokens alone. A prefix is judged in the worker processes while sampling
continues; the answer takes effect ``DELAY`` tokens later, and sampling waits for it there. So neither the speed of the
workers nor the other rows of the pass can change a result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cdpg.constraints.calling import Call, forget
from cdpg.constraints.prefixes import PrefixCheck
from cdpg.contexts.contexts import Context
from cdpg.errors import UserError
from cdpg.sandbox.worker import short_repr

DELAY = 4
"""Tokens that are drawn while a prefix is judged."""
EVERY = 8
"""Tokens between two calls of a function without ``watch``."""
AUDITED = 32
"""One of this many samples is drawn to its end in any case, so that a wrong answer can be noticed."""

Text = Callable[[int, Sequence[int]], str]


@dataclass(frozen=True)
class Doomed:
    """A prefix that was called hopeless, and by which function."""

    label: str
    prefix: str


@dataclass(frozen=True)
class _Question:
    """Prefixes of some rows that are being judged."""

    due: int
    check: PrefixCheck
    rows: list[int]
    prefixes: list[str]
    call: Call


class Pruner:
    """Prunes the passes of an epoch."""

    def __init__(
        self, checks: Sequence[PrefixCheck], contexts: Sequence[Context], first_slot: int, token_texts: dict[int, str]
    ) -> None:
        """``contexts`` has the context of each row; ``token_texts`` caches the texts of tokens between epochs."""
        self.checks, self.contexts, self.first_row = checks, contexts, first_slot
        self.token_texts = token_texts
        self.audited: dict[int, Doomed] = {}
        """By row: the samples that were drawn to their end although a prefix was called hopeless."""

    def __call__(self, rows: Sequence[int]) -> PassPruning:
        return PassPruning(self, rows)

    def is_audited(self, row: int) -> bool:
        return (self.first_row + row) % AUDITED == 0

    def refuse_wrong_answers(self, b: Sequence[float], texts: Callable[[int], str]) -> None:
        """Refuse a function that called a prefix hopeless which a satisfying sample begins with."""
        for row, doomed in self.audited.items():
            if b[row] > 0:
                raise UserError(
                    f"{doomed.label} is wrong: it returned true for the prefix {short_repr(doomed.prefix)}, and the "
                    f"constraint gave {b[row]:g} for {short_repr(texts(row))}: let it return true only where b = 0 "
                    "whatever follows, or set prune: false"
                )


class PassPruning:
    """Watches the rows of one pass, by their places in it."""

    def __init__(self, pruner: Pruner, rows: Sequence[int]) -> None:
        self._pruner, self._rows = pruner, rows
        self._step = 0
        self._asked: deque[_Question] = deque()

    def hopeless(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], text: Text) -> Collection[int]:
        """See :class:`~cdpg.models.sampling.Pruning`."""
        self._step += 1
        for check in self._pruner.checks:
            self._ask(check, [row for row in rows if self._is_due(check, row, tokens[row], text)], tokens, text)
        unfinished, ended = set(rows), set[int]()
        while self._asked and self._asked[0].due == self._step:
            ended |= self._answers(self._asked.popleft(), unfinished)
        return ended

    def close(self) -> None:
        """Drop the answers that have not arrived."""
        for question in self._asked:
            forget(question.call)
        self._asked.clear()

    def _is_due(self, check: PrefixCheck, row: int, tokens: Sequence[int], text: Text) -> bool:
        if check.watch is None:
            return len(tokens) % EVERY == 0
        known = self._pruner.token_texts
        token = tokens[-1]
        if token not in known:
            known[token] = text(row, [token, token])  # twice: the blank before a text's first token may be stripped
        return not check.watch.isdisjoint(known[token])

    def _ask(self, check: PrefixCheck, rows: list[int], tokens: Sequence[Sequence[int]], text: Text) -> None:
        if not rows:
            return
        # A character may need several tokens; until it is whole, there is a replacement character at the end.
        prefixes = [text(row, tokens[row]).rstrip("\ufffd") for row in rows]
        call = check.submit([self._pruner.contexts[self._rows[row]] for row in rows], prefixes)
        self._asked.append(_Question(self._step + DELAY, check, rows, prefixes, call))

    def _answers(self, question: _Question, unfinished: set[int]) -> set[int]:
        """The rows that end here; it does not wait if all of them have already ended."""
        if unfinished.isdisjoint(question.rows):
            forget(question.call)
            return set()
        ended = set()
        answers = question.check.collect(question.call)
        for row, prefix, hopeless in zip(question.rows, question.prefixes, answers, strict=True):
            if hopeless and row in unfinished:
                number = self._rows[row]
                if self._pruner.is_audited(number):
                    self._pruner.audited.setdefault(number, Doomed(question.check.label, prefix))
                else:
                    ended.add(row)
        return ended
