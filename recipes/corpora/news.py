"""A seeded grammar of short news articles, each with reference summaries that mention three to six names."""

from __future__ import annotations

import dataclasses
import random
import string

from corpora import news_lexicon as lexicon

_PEOPLE, _CITIES, _COUNTRIES, _GROUPS = "pq", "cd", "nm", "ou"
_NEED_THE = ("United States", "United Kingdom", "Netherlands")


@dataclasses.dataclass(frozen=True)
class Story:
    """Who, where and what: the facts of an article, by the letters of the patterns."""

    kind: str
    facts: dict[str, str]

    @property
    def key(self) -> str:
        """What makes two stories the same: the kind and the main person, group and city."""
        return "|".join((self.kind, self.facts["p"], self.facts["o"], self.facts["c"]))


def imagine(rng: random.Random) -> Story:
    """Draw the facts of a story, all names in it distinct."""
    kind = rng.choice(tuple(lexicon.KINDS))
    surnames = rng.sample(lexicon.SURNAMES, 2)
    firsts = rng.sample(lexicon.FIRST_NAMES, 2)
    places = lexicon.PLACES[: lexicon.LINKED_BY_RAIL] if kind == "railway" else lexicon.PLACES
    here = rng.choice(places)
    there = rng.choice([place for place in places if place[1] != here[1]])
    groups, others = lexicon.GROUPS[kind]
    first_group = rng.choice(groups)
    second_group = rng.choice([group for group in others if group != first_group])
    facts = {
        "p": f"{firsts[0]} {surnames[0]}",
        "s": surnames[0],
        "q": f"{firsts[1]} {surnames[1]}",
        "t": surnames[1],
        "o": first_group,
        "u": second_group,
        "c": here[0],
        "n": _country(here[1]),
        "a": here[2],
        "d": there[0],
        "m": _country(there[1]),
        "e": rng.choice(lexicon.EVENTS),
        "k": rng.choice(lexicon.COUNTS),
        "w": rng.choice(lexicon.WEEKDAYS),
    }
    return Story(kind, facts)


def _country(name: str) -> str:
    return f"the {name}" if name in _NEED_THE else name


def write(story: Story, rng: random.Random) -> tuple[str, str]:
    """An article of 60 to 120 words, and a reference summary whose names all stand in the article."""
    while True:
        article, summary = _draft_article(story, rng), _draft_summary(story, rng)
        named = _names(summary)
        told = _names(article)
        if not (3 <= len(named) <= 6 and named <= told and _introduces(article)):
            continue
        text = _render(article, story.facts)
        if 60 <= len(text.split()) <= 120:
            return text, _render(summary, story.facts)


def glimpse(story: Story, rng: random.Random) -> tuple[str, str]:
    """Two or three sentences and a summary of one, every name of which stands in them: to learn copying from."""
    patterns = lexicon.KINDS[story.kind]
    while True:
        article = [rng.choice(patterns["lead"]), *rng.sample(patterns["detail"], rng.choice((1, 2)))]
        summary = [rng.choice(patterns["brief"] + patterns["full"])]
        if _names(summary) and _names(summary) <= _names(article) and _introduces(article):
            return _render(article, story.facts), _render(summary, story.facts)


def _draft_article(story: Story, rng: random.Random) -> list[str]:
    """A lead, what happened, and what was said about it."""
    patterns = lexicon.KINDS[story.kind]
    middle = rng.sample(patterns["detail"], rng.choice((3, 4, 4)))
    chosen = [rng.choice(patterns["lead"]), *middle]
    for extra in rng.sample(lexicon.COMMON, rng.randrange(2, 5)):
        chosen.insert(rng.randrange(2, len(chosen) + 1), extra)
    return chosen


def _draft_summary(story: Story, rng: random.Random) -> list[str]:
    chosen = [rng.choice(lexicon.KINDS[story.kind]["full"])]
    return [*chosen, rng.choice(lexicon.SECOND)] if rng.random() < 0.4 else chosen


def _names(patterns: list[str]) -> set[str]:
    return {letter for pattern in patterns for letter in slots(pattern) if letter not in "kwst"}


def _render(patterns: list[str], facts: dict[str, str]) -> str:
    return " ".join(fill(pattern, facts) for pattern in patterns)


def _introduces(patterns: list[str]) -> bool:
    """Whether a surname alone comes only after the full name."""
    letters = [letter for pattern in patterns for letter in slots(pattern)]
    for full, short in ("ps", "qt"):
        if short in letters and full not in letters[: letters.index(short)]:
            return False
    return True


def slots(pattern: str) -> list[str]:
    """The letters that a pattern asks for, in order."""
    return [name for _, name, _, _ in string.Formatter().parse(pattern) if name]


def fill(pattern: str, facts: dict[str, str]) -> str:
    """A sentence with its names, capitalised."""
    text = pattern.format_map(facts)
    return text[0].upper() + text[1:]


def summarise_loosely(story: Story, rng: random.Random, brief_share: float, wrong_share: float) -> str:
    """A summary as a hasty writer makes it: often with few names, sometimes with a wrong one."""
    patterns = lexicon.KINDS[story.kind]
    facts = dict(story.facts)
    chosen = [rng.choice(patterns["brief"] if rng.random() < brief_share else patterns["full"])]
    if rng.random() < 0.4:
        chosen.append(rng.choice(lexicon.SECOND))
    if rng.random() < wrong_share:
        named = [
            letter
            for pattern in chosen
            for letter in slots(pattern)
            if letter in _PEOPLE + _CITIES + _COUNTRIES + _GROUPS
        ]
        if named:
            letter = rng.choice(named)
            facts[letter] = imagine(rng).facts[letter]
    return _render(chosen, facts)
