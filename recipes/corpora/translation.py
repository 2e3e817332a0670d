"""A seeded grammar of English-French sentence pairs, rich in the numerals one to nine.

Sentences are composed, not filled in: noun phrases with agreeing adjectives, tenses, modals, negation, passives,
relative and subordinate clauses, coordination, expressions of time, place and measure, over a dozen topics.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from corpora import clauses, french
from corpora.clauses import Speaker
from corpora.french import FEMININE, MASCULINE
from corpora.lexicon import nouns, topics
from corpora.phrases import PRONOUNS, Text, conjugate, draw_value, join, numeral, plain_phrase, to_be

_OPENINGS: tuple[Text, ...] = (
    ("Mr President,", "Monsieur le Président,"),
    ("Ladies and gentlemen,", "Mesdames et Messieurs,"),
    ("Unfortunately,", "Malheureusement,"),
    ("Fortunately,", "Heureusement,"),
    ("In fact,", "En fait,"),
    ("According to the newspaper,", "Selon le journal,"),
    ("As you know,", "Comme vous le savez,"),
)
_PLACES: tuple[Text, ...] = (
    ("the village", "le village"),
    ("the castle", "le château"),
    ("the hotel", "l'hôtel"),
    ("the beach", "la plage"),
    ("the station", "la gare"),
    ("the school", "l'école"),
    ("the farm", "la ferme"),
    ("the airport", "l'aéroport"),
)
_OPENING_HOURS: tuple[Text, ...] = (
    ("the shop opens", "le magasin ouvre"),
    ("the museum closes", "le musée ferme"),
    ("the meeting starts", "la réunion commence"),
    ("the train arrives", "le train arrive"),
    ("the plane leaves", "l'avion part"),
    ("the concert begins", "le concert commence"),
    ("dinner is ready", "le dîner est prêt"),
    ("the lesson ends", "la leçon se termine"),
)
_LASTING: tuple[Text, ...] = (
    ("the trip lasts", "le voyage dure"),
    ("the match lasted", "le match a duré"),
    ("the debate will last", "le débat durera"),
    ("the film lasts", "le film dure"),
    ("the operation lasted", "l'opération a duré"),
    ("the visit will last", "la visite durera"),
)
_LABELS: tuple[tuple[Text, Text], ...] = (
    (("article", "l'article"), ("of the treaty is clear", "du traité est clair")),
    (("chapter", "le chapitre"), ("is too long", "est trop long")),
    (("page", "la page"), ("is missing", "manque")),
    (("room", "la salle"), ("is on the first floor", "est au premier étage")),
    (("bus", "le bus"), ("goes to the station", "va à la gare")),
    (("platform", "le quai"), ("is closed", "est fermé")),
    (("question", "la question"), ("is difficult", "est difficile")),
    (("table", "la table"), ("is free", "est libre")),
    (("amendment", "l'amendement"), ("was rejected", "a été rejeté")),
)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A sentence whose French numbers are still marks, and the kind of sentence it is."""

    source: str
    french: str
    is_measure: bool
    """Prices, times, distances, scores: where people write digits more readily."""

    def reference(self, digits: bool = False) -> str:
        """The French sentence, its numbers as words or as digits."""
        text = french.finish(self.french, digits)
        return text[0].upper() + text[1:]

    @property
    def is_counted(self) -> bool:
        """Whether the sentence has a numeral."""
        return "⟦" in self.french


def pricing(speaker: Speaker) -> Text:
    """What something costs."""
    rng = speaker.rng
    thing = speaker.phrase(
        nouns()[rng.choice(("ticket", "book", "cake", "coat", "lamp", "melon", "hat", "map", "toy"))], "definite", True
    )
    value = draw_value(rng)
    forms = rng.choice(
        (
            (("costs", "cost"), ("coûte", "coûtent")),
            (("cost", "cost"), ("a coûté", "ont coûté")),
            (("will cost",) * 2, ("coûtera", "coûteront")),
        )
    )
    verb = (forms[0][thing.is_plural], forms[1][thing.is_plural])
    return join(thing.text, verb, numeral(value, MASCULINE), ("euro" + "s" * (value > 1),) * 2)


def distance(speaker: Speaker) -> Text:
    """How far one place is from another."""
    rng = speaker.rng
    here, there = rng.sample(_PLACES, 2)
    value = draw_value(rng)
    plural = "s" * (value > 1)
    unit, gender = rng.choice(
        (("kilometre|kilomètre", MASCULINE), ("hour|heure", FEMININE), ("minute|minute", FEMININE))
    )
    english, foreign = unit.split("|")
    return join(
        here, ("is", "est à"), numeral(value, gender), (f"{english}{plural} from", f"{foreign}{plural} de"), there
    )


def age(speaker: Speaker) -> Text:
    """How old someone or something is."""
    rng = speaker.rng
    who = plain_phrase(
        nouns()[rng.choice(("brother", "sister", "cousin", "girl", "boy", "dog", "cat", "horse", "car"))],
        rng,
        "definite",
    )
    value = draw_value(rng)
    english = f"year{'s' * (value > 1)} old"
    verb = (to_be("present", who)[0], french.AVOIR[who.person])
    return join(who.text, verb, numeral(value, MASCULINE), (english, "ans" if value > 1 else "an"))


def opening(speaker: Speaker) -> Text:
    """The hour at which something happens, or the hours between which a shop is open."""
    rng, value = speaker.rng, draw_value(speaker.rng)
    hour = ("o'clock", "heures" if value > 1 else "heure")
    if rng.random() < 0.25:
        later = draw_value(rng, min(value + 1, 9))
        span = join(("from", "de"), numeral(value, FEMININE), ("to", hour[1] + " à"), numeral(later, FEMININE))
        return join(("the library is open", "la bibliothèque est ouverte"), span, ("o'clock", "heures"))
    return join(rng.choice(_OPENING_HOURS), ("at", "à"), numeral(value, FEMININE), hour)


def lasting(speaker: Speaker) -> Text:
    """How long something takes."""
    rng = speaker.rng
    low = draw_value(rng)
    unit, foreign, gender = rng.choice(
        (("hour", "heure", FEMININE), ("minute", "minute", FEMININE), ("day", "jour", MASCULINE))
    )
    if low < 8 and rng.random() < 0.4:
        high = draw_value(rng, low + 1)
        span = join(("between", "entre"), numeral(low, gender), ("and", "et"), numeral(high, gender))
        return join(rng.choice(_LASTING), span, (unit + "s", foreign + "s"))
    plural = "s" * (low > 1)
    return join(rng.choice(_LASTING), numeral(low, gender), (unit + plural, foreign + plural))


def voting(speaker: Speaker) -> Text:
    """The outcome of a vote or of a match."""
    rng = speaker.rng
    more = draw_value(rng, 2)
    less = rng.randrange(1, more)
    if rng.random() < 0.5:
        noun = nouns()[rng.choice(("report", "amendment", "resolution", "proposal", "law", "agreement"))]
        what = plain_phrase(noun, rng, "definite")
        verb = rng.choice((("adopted", "adopté"), ("rejected", "rejeté"), ("approved", "approuvé")))
        english = to_be("past", what)[0]
        done = (
            f"{english} {verb[0]} by",
            f"{french.AVOIR[what.person]} été {french.agree(verb[1], what.gender, what.is_plural)} par",
        )
        return join(what.text, done, numeral(more, FEMININE), ("votes to", "voix contre"), numeral(less, FEMININE))
    team = rng.choice(
        (("our team", "notre équipe"), ("the French team", "l'équipe française"), ("the visitors", "les visiteurs"))
    )
    won = ("won by", "ont gagné par" if team[0].endswith("s") else "a gagné par")
    return join(team, won, numeral(more, MASCULINE), ("goals to", "buts à"), numeral(less, MASCULINE))


def labelled(speaker: Speaker) -> Text:
    """A number that names something: *l'article quatre*, *le bus cinq*."""
    name, rest = speaker.rng.choice(_LABELS)
    return join(name, numeral(draw_value(speaker.rng), MASCULINE), rest)


def among(speaker: Speaker) -> Text:
    """So many of a whole: *sur les neuf joueurs, quatre ont terminé la course*."""
    rng, noun = speaker.rng, speaker.rng.choice(speaker.topic.agents)
    whole = draw_value(rng, 3)
    value = rng.randrange(2, whole)
    verb, things = rng.choice(speaker.topic.actions)
    thing = plain_phrase(rng.choice(things), rng)
    group = join(("of the", "sur les"), numeral(whole, noun.gender), (noun.plural + ",", noun.french_plural + ","))
    return join(
        group, numeral(value, noun.gender), (verb.past, f"ont {verb.past_participle}"), thing.text, speaker.place()
    )


_COMMON: tuple[tuple[Callable[[Speaker], Text], int], ...] = (
    (clauses.clause, 22),
    (clauses.moving, 9),
    (clauses.existing, 8),
    (clauses.describing, 7),
    (clauses.suffering, 8),
    (clauses.owning, 7),
    (clauses.buying, 5),
    (clauses.relating, 6),
    (clauses.asking, 6),
    (clauses.urging, 6),
    (clauses.linking, 16),
)
_MEASURES: tuple[tuple[Callable[[Speaker], Text], int], ...] = (
    (pricing, 4),
    (distance, 2),
    (age, 2),
    (opening, 3),
    (lasting, 2),
    (voting, 3),
    (labelled, 2),
    (among, 4),
)


def compose(rng: random.Random, counted: bool = True) -> Draft:
    """One sentence, with at least one numeral if ``counted``, else with none."""
    while True:
        found = _attempt(rng, counted)
        if found.is_counted == counted and len(found.source.split()) <= 32:
            return found


def _attempt(rng: random.Random, counted: bool) -> Draft:
    speaker = Speaker(rng, rng.choice(topics()), 0.55 if counted else 0.0)
    patterns = _COMMON + _MEASURES if counted else _COMMON
    pattern = rng.choices([each for each, _ in patterns], weights=[weight for _, weight in patterns])[0]
    english, foreign = pattern(speaker)
    if pattern not in (clauses.asking, clauses.urging) and rng.random() < 0.08:
        openings = _OPENINGS if speaker.topic.name == "parliament" else _OPENINGS[2:]
        english, foreign = join(rng.choice(openings), (english, foreign))
    mark = "" if english.endswith("?") else "."
    english = english.replace(" ?", "?") + mark
    is_measure = pattern is not among and any(pattern is each for each, _ in _MEASURES)
    return Draft(english[0].upper() + english[1:], foreign + mark, is_measure)


def compose_phrase(rng: random.Random, counted_share: float = 0.6) -> Draft:
    """A noun phrase, or a pronoun with a verb and a noun phrase: from such, words are learnt before sentences are."""
    speaker = Speaker(rng, rng.choice(topics()), counted_share)
    text = speaker.phrase(rng.choice(speaker.topic.agents + speaker.topic.objects)).text
    if rng.random() < 0.4:
        who, (verb, _) = rng.choice(PRONOUNS), rng.choice(speaker.topic.actions)
        text = join(who.text, conjugate(verb, speaker.tense(), who), text)
    return Draft(text[0][0].upper() + text[0][1:], text[1], is_measure=False)
