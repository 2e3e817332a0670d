"""Seeded corpora of the embedded tasks, split so that base training, tuning and evaluation never share a text.

A text belongs to the split that the hash of its content names: sentences by their English words with the numerals
taken out (so that *two dogs* and *three dogs* fall together), articles by the kind of story, the main person, the
organisation and the city. Whatever the seed, the splits are therefore disjoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import re
from collections.abc import Iterator

from cdpg.errors import UserError
from corpora import news, records, translation

SPLITS = ("base", "tune", "held-out")
_NUMERAL = re.compile(r"\b(?:one|two|three|four|five|six|seven|eight|nine)\b", re.IGNORECASE)
MEASURE_FACTOR = 2.5
"""How much likelier digits are in the base's training pairs where the sentence gives a price, a time or a score."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """A text and what it should become."""

    source: str
    reference: str


def split_of(key: str) -> str:
    """The split of a text: eight tenths for the base, one for tuning, one held out."""
    bucket = hashlib.sha256(key.encode("utf-8")).digest()[0] * 10 // 256
    return SPLITS[max(0, bucket - 7)]


def sentence_key(source: str) -> str:
    """What makes two sentences the same for the split: the words without the numerals."""
    return _NUMERAL.sub("#", source).lower()


def translation_pairs(split: str, count: int, seed: int = 0) -> list[Pair]:
    """Distinct English sentences, each with a numeral, and their French translations, numbers as words."""
    rng = _source(split, "translation", seed)
    found: dict[str, Pair] = {}
    while len(found) < count:
        draft = translation.compose(rng)
        if split_of(sentence_key(draft.source)) == split:
            found.setdefault(draft.source, Pair(draft.source, draft.reference()))
    return list(found.values())


def news_pairs(split: str, count: int, seed: int = 0) -> list[Pair]:
    """Distinct articles and reference summaries that mention three to six names of the article."""
    rng = _source(split, "news", seed)
    found: dict[str, Pair] = {}
    while len(found) < count:
        story = news.imagine(rng)
        if split_of(story.key) == split:
            found.setdefault(story.key, Pair(*news.write(story, rng)))
    return list(found.values())


def record_rows(split: str, count: int, seed: int = 0) -> list[records.Extract]:
    """Distinct sentences with a record in each, for tuning or held out; the splits have other templates."""
    rng = _source(split, "records", seed)
    found: dict[str, records.Extract] = {}
    while len(found) < count:
        extract = records.draw(rng, split)
        found.setdefault(extract.sentence, extract)
    return list(found.values())


def base_translations(
    seed: int, split: str = "base", digit_share: float = 0.0, plain_share: float = 0.15, longest: int | None = None
) -> Iterator[Pair]:
    """Endless pairs to train a base model on, of at most ``longest`` English words.

    A share of them has no numeral; in another, small share the French numbers are digits, more often where the
    sentence gives a measure.
    """
    rng = _source(split, "base-translation", seed)
    while True:
        draft = translation.compose(rng, counted=rng.random() >= plain_share)
        if _is_wanted(draft, split, longest):
            yield Pair(draft.source, draft.reference(_chance_of_digits(draft, digit_share) > rng.random()))


def base_phrases(seed: int, split: str = "base", digit_share: float = 0.0) -> Iterator[Pair]:
    """Endless short phrases, from which a model learns words before it learns sentences."""
    rng = _source(split, "base-phrases", seed)
    while True:
        draft = translation.compose_phrase(rng)
        if _is_wanted(draft, split, None):
            yield Pair(draft.source, draft.reference(_chance_of_digits(draft, digit_share) > rng.random()))


def _is_wanted(draft: translation.Draft, split: str, longest: int | None) -> bool:
    fits = longest is None or len(draft.source.split()) <= longest
    return fits and split_of(sentence_key(draft.source)) == split


def _chance_of_digits(draft: translation.Draft, share: float) -> float:
    return share * (MEASURE_FACTOR if draft.is_measure else 1.0)


def base_news(seed: int, split: str = "base", brief_share: float = 0.5, wrong_share: float = 0.25) -> Iterator[Pair]:
    """Endless articles to train a base model on, with hasty summaries: often few names, sometimes a wrong one."""
    rng = _source(split, "base-news", seed)
    while True:
        story = news.imagine(rng)
        if split_of(story.key) == split:
            article, _ = news.write(story, rng)
            yield Pair(article, news.summarise_loosely(story, rng, brief_share, wrong_share))


def base_glimpses(seed: int, split: str = "base") -> Iterator[Pair]:
    """Endless articles of two or three sentences with exact summaries, from which a model learns to copy names."""
    rng = _source(split, "base-glimpses", seed)
    while True:
        story = news.imagine(rng)
        if split_of(story.key) == split:
            yield Pair(*news.glimpse(story, rng))


def _source(split: str, name: str, seed: int) -> random.Random:
    if split not in SPLITS:
        raise UserError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    return random.Random(f"{name}/{split}/{seed}")
