"""Phrases of the translation grammar: each is built in English and in French at once."""

from __future__ import annotations

import dataclasses
import random

from corpora import french
from corpora.french import FEMININE, MASCULINE, Adjective, Verb, number
from corpora.lexicon import Noun, adjectives

ENGLISH_NUMBERS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
Text = tuple[str, str]
"""The same words in English and in French."""

_POSSESSIVES = (
    ("my", "mon", "ma", "mes"),
    ("our", "notre", "notre", "nos"),
    ("your", "votre", "votre", "vos"),
    ("his", "son", "sa", "ses"),
    ("her", "son", "sa", "ses"),
    ("their", "leur", "leur", "leurs"),
)
_ORDER = (("last", "dernier", "dernière"), ("first", "premier", "première"))
_BEFORE_NUMBERS: dict[str, Text] = {
    "the": ("the", "les"),
    "these": ("these", "ces"),
    "all": ("all", "les"),
    "least": ("at least", "au moins"),
    "more": ("more than", "plus de"),
    "exactly": ("exactly", "exactement"),
}
_DEFINITE = ("the", "the", "possessive", "these", "order", "all")
_LOOSE = ("bare",) * 6 + ("least", "more", "exactly", "or")
STYLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "any": (
        ("the", "thes", "a", "some", "several", "many", "possessive"),
        (*_DEFINITE, *_LOOSE, "bare", "bare", "bare", "of", "each", "only"),
    ),
    "definite": (("the", "thes", "possessive", "this"), _DEFINITE),
    "the": (("the", "thes"), ("the", "the", "order", "all")),
    "indefinite": (("a", "some", "several", "many"), _LOOSE),
}
"""Determiners that fit a place in the sentence: without a numeral, and with one."""
_MODALS = {
    "must": ("must", "must", ("dois", "doit", "devons", "devez", "doivent")),
    "can": ("can", "can", ("peux", "peut", "pouvons", "pouvez", "peuvent")),
    "want": ("want to", "wants to", ("veux", "veut", "voulons", "voulez", "veulent")),
    "going": ("are going to", "is going to", ("vais", "va", "allons", "allez", "vont")),
}
_NOT_AN = ("useful", "European", "one")


@dataclasses.dataclass(frozen=True)
class Phrase:
    """A noun phrase or pronoun: its text, and what verbs and participles agree with."""

    text: Text
    gender: str
    person: int
    """Index in ``french.PERSONS``."""
    kind: str = ""
    """Class of the noun; empty for a pronoun."""

    @property
    def is_plural(self) -> bool:
        """Whether the French verb is plural."""
        return self.person in (2, 3, 4)

    @property
    def is_third_singular(self) -> bool:
        """Whether the English verb takes an s."""
        return self.person == 1


PRONOUNS = (
    Phrase(("I", "je"), MASCULINE, 0),
    Phrase(("he", "il"), MASCULINE, 1),
    Phrase(("she", "elle"), FEMININE, 1),
    Phrase(("we", "nous"), MASCULINE, 2),
    Phrase(("you", "vous"), MASCULINE, 3),
    Phrase(("they", "ils"), MASCULINE, 4),
)


def join(*parts: Text) -> Text:
    """Concatenate phrases in both languages, leaving out the empty ones."""
    return " ".join(part[0] for part in parts if part[0]), " ".join(part[1] for part in parts if part[1])


def numeral(value: int, gender: str) -> Text:
    """A number from one to nine, its French spelling still to be chosen."""
    return ENGLISH_NUMBERS[value], number(value, gender)


def draw_value(rng: random.Random, least: int = 1) -> int:
    """One to nine, small numbers the more likely, as in ordinary text."""
    return rng.choices(range(least, 10), weights=[12, 22, 18, 13, 11, 8, 7, 6, 6][least - 1 :])[0]


def core(noun: Noun, adjective: Adjective | None, is_plural: bool, other: bool = False) -> Text:
    """Adjective and noun, the French adjective agreeing and on its own side of the noun."""
    english = noun.plural if is_plural else noun.singular
    foreign = noun.french_plural if is_plural else noun.french_singular
    if adjective is not None:
        form = adjective.form(noun.gender, is_plural, foreign if adjective.before else "")
        foreign = f"{form} {foreign}" if adjective.before else f"{foreign} {form}"
        english = f"{adjective.english} {english}"
    if other:
        english, foreign = f"other {english}", ("autres " if is_plural else "autre ") + foreign
    return english, foreign


def article(word: str) -> str:
    """The English indefinite article: a or an."""
    return "an" if word[0] in "aeiouE" and not word.startswith(_NOT_AN) else "a"


def possessed(body: Text, gender: str, is_plural: bool, rng: random.Random) -> Text:
    """A possessive before the body; *mon*, *son* before a feminine that starts with a vowel."""
    english, masculine, feminine, plural = rng.choice(_POSSESSIVES)
    if is_plural:
        return join((english, plural), body)
    liaison = masculine if french.elides(body[1]) else feminine
    return join((english, liaison if gender == FEMININE else masculine), body)


def demonstrative(body: Text, gender: str, is_plural: bool) -> Text:
    """This or these: *ce*, *cet*, *cette*, *ces*."""
    if is_plural:
        return join(("these", "ces"), body)
    masculine = "cet" if french.elides(body[1]) else "ce"
    return join(("this", "cette" if gender == FEMININE else masculine), body)


def pick_adjective(noun: Noun, rng: random.Random, share: float = 0.33) -> Adjective | None:
    """An adjective that suits the noun's class, or none."""
    choices = adjectives(noun.kind)
    return rng.choice(choices) if choices and rng.random() < share else None


def plain_phrase(noun: Noun, rng: random.Random, style: str = "any") -> Phrase:
    """A noun phrase without a numeral, in one of the styles of ``STYLES``."""
    kind = rng.choice(STYLES[style][0])
    many = kind in ("thes", "some", "several", "many") or (kind in ("possessive", "this") and rng.random() < 0.4)
    adjective = pick_adjective(noun, rng)
    body = core(noun, adjective, many)
    gender = noun.gender
    if kind in ("the", "thes"):
        text = join(("the", "les" if many else "la" if gender == FEMININE else "le"), body)
    elif kind == "a":
        text = join((article(body[0]), "une" if gender == FEMININE else "un"), body)
    elif kind == "some":
        text = join(("some", "de" if adjective is not None and adjective.before else "des"), body)
    elif kind == "several":
        text = join(("several", "plusieurs"), body)
    elif kind == "many":
        text = join(("many", "beaucoup de"), body)
    else:
        text = possessed(body, gender, many, rng) if kind == "possessive" else demonstrative(body, gender, many)
    return Phrase(text, gender, 4 if many else 1, noun.kind)


def counted_phrase(noun: Noun, rng: random.Random, style: str = "any", is_subject: bool = False) -> Phrase:
    """A noun phrase with one numeral or two, in one of the styles of ``STYLES``."""
    kind = rng.choice(STYLES[style][1])
    value = draw_value(rng, 3 if kind == "all" else 1 if kind in ("bare", "of", "least", "only") else 2)
    adjective = pick_adjective(noun, rng)
    if kind in ("of", "each"):
        return partitive(noun, value, adjective, kind == "each", rng)
    many = value > 1
    count = numeral(value, noun.gender)
    body = core(noun, adjective, many, other=many and kind == "bare" and rng.random() < 0.1)
    counted = join(count, body)
    if kind in _BEFORE_NUMBERS:
        text = join(_BEFORE_NUMBERS[kind], counted)
    elif kind == "possessive":
        text = possessed(counted, noun.gender, True, rng)
    elif kind == "order":
        english, *forms = rng.choice(_ORDER)
        text = join((f"the {english}", "les"), count, ("", french.plural(forms[noun.gender == FEMININE])), body)
    elif kind == "only":
        text = only(count, body, value, noun.gender, is_subject)
    elif kind == "or" and value < 9:
        text = join(count, ("or", "ou"), numeral(value + 1, noun.gender), core(noun, adjective, True))
    else:
        text = counted
    return Phrase(text, noun.gender, 4 if many else 1, noun.kind)


def only(count: Text, body: Text, value: int, gender: str, is_subject: bool) -> Text:
    """Only: *un seul élève*, *seuls deux élèves* as a subject, *seulement deux élèves* elsewhere."""
    alone = french.agree("seul", gender, value > 1)
    if value == 1:
        return join(("only", ""), count, ("", alone), body)
    return join(("only", alone if is_subject else "seulement"), count, body)


def partitive(noun: Noun, value: int, adjective: Adjective | None, each: bool, rng: random.Random) -> Phrase:
    """Some of a counted whole: *deux des cinq rapports*, *chacune des trois lettres*."""
    value = min(value, 8)
    whole = draw_value(rng, value + 1)
    group = join(("of the", "de les"), numeral(whole, noun.gender), core(noun, adjective, True))
    if each:
        text = join(("each", "chacune" if noun.gender == FEMININE else "chacun"), group)
        return Phrase(text, noun.gender, 1, noun.kind)
    return Phrase(join(numeral(value, noun.gender), group), noun.gender, 1 if value == 1 else 4, noun.kind)


def conjugate(verb: Verb, tense: str, subject: Phrase) -> Text:
    """The verb in a tense: past, perfect, present, future, a modal, or ``not`` and one of the first four."""
    negated, tense = tense.startswith("not "), tense.removeprefix("not ")
    person, singular = subject.person, subject.is_third_singular
    if tense in _MODALS:
        many, one, forms = _MODALS[tense]
        modal = "am going to" if tense == "going" and person == 0 else one if singular else many
        return f"{modal} {verb.base}", f"{forms[person]} {verb.infinitive}"
    if tense in ("past", "perfect"):
        auxiliary = (french.ETRE if verb.with_etre else french.AVOIR)[person]
        agreed = french.agree(verb.past_participle, subject.gender, subject.is_plural)
        finite, rest = auxiliary, " " + (agreed if verb.with_etre else verb.past_participle)
    else:
        finite, rest = (verb.present[person] if tense == "present" else french.future(verb.future_stem, person)), ""
    foreign = f"ne {finite} pas{rest}" if negated else finite + rest
    return _english(verb, tense, singular, negated), foreign


def _english(verb: Verb, tense: str, singular: bool, negated: bool) -> str:
    if tense == "perfect":
        return ("has " if singular else "have ") + ("not " if negated else "") + verb.participle
    if tense == "future":
        return ("will not " if negated else "will ") + verb.base
    if tense == "past":
        return f"did not {verb.base}" if negated else verb.past
    if negated:
        return ("does not " if singular else "do not ") + verb.base
    return verb.third if singular else verb.base


def to_be(tense: str, subject: Phrase) -> Text:
    """To be, in the present, the past (imperfect in French) or the future."""
    person, singular = subject.person, subject.is_third_singular
    if tense == "future":
        return "will be", french.future("ser", person)
    if tense == "past":
        forms = ("étais", "était", "étions", "étiez", "étaient")
        return ("was" if singular or person == 0 else "were"), forms[person]
    return ("am" if person == 0 else "is" if singular else "are"), french.ETRE[person]


def passive(verb: Verb, tense: str, subject: Phrase) -> Text:
    """The passive, its participle agreeing: *ont été envoyées*, *seront envoyées*."""
    participle = french.agree(verb.past_participle, subject.gender, subject.is_plural)
    english, foreign = to_be(tense, subject)
    if tense == "past":
        foreign = f"{french.AVOIR[subject.person]} été"
    return f"{english} {verb.participle}", f"{foreign} {participle}"
