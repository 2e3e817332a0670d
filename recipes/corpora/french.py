"""French morphology for the translation grammar: agreement, conjugation, elision, contraction."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

MASCULINE, FEMININE = "m", "f"
NUMBER_WORDS = ("", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf")
_NOT_ELIDED = ("huit", "onze", "haut", "haricot", "hibou", "hero", "homard", "hall", "hamster", "hockey", "oui")
_ELIDING = frozenset({"le", "la", "de", "je", "ne", "que", "se", "me", "lorsque", "puisque"})
_CONTRACTED = {("de", "le"): "du", ("de", "les"): "des", ("à", "le"): "au", ("à", "les"): "aux"}
_MARKED_NUMBER = re.compile(r"⟦([1-9])([mf])⟧")


def plain(text: str) -> str:
    """Lower case without accents."""
    decomposed = unicodedata.normalize("NFD", text.lower().replace("œ", "oe"))
    return "".join(letter for letter in decomposed if not unicodedata.combining(letter))


def elides(word: str) -> bool:
    """Whether *le* becomes *l'* before this word: a vowel or a mute h, and not *huit* or *haricot*."""
    bare = plain(word)
    return bare[:1] in tuple("aeiouh") and not bare.startswith(_NOT_ELIDED)


def number(value: int, gender: str) -> str:
    """A number kept as a mark until the sentence is complete, since its spelling is chosen last."""
    return f"⟦{value}{gender}⟧"


def finish(text: str, digits: bool = False) -> str:
    """Spell the numbers, then apply elision (*l'arbre*) and contraction (*du*, *aux*)."""
    words = _MARKED_NUMBER.sub(lambda mark: _spell(int(mark[1]), mark[2], digits), text).split()
    elided: list[str] = []
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
        if word.lower() in _ELIDING and elides(following):
            elided.append(word[:-1] + "'")
        elif word.lower() == "si" and following in ("il", "ils"):
            elided.append(word[0] + "'")
        else:
            elided.append(word)
    joined: list[str] = []
    for word in elided:
        contraction = _CONTRACTED.get((joined[-1].lower(), word)) if joined else None
        if contraction:
            joined[-1] = contraction.capitalize() if joined[-1][0].isupper() else contraction
        else:
            joined.append(word)
    return " ".join(joined).replace("' ", "'")


def _spell(value: int, gender: str, digits: bool) -> str:
    if digits:
        return str(value)
    return "une" if value == 1 and gender == FEMININE else NUMBER_WORDS[value]


def plural(word: str) -> str:
    """Regular plural of a noun or a masculine adjective."""
    if word.endswith(("s", "x", "z")):
        return word
    if word.endswith("al"):
        return word[:-2] + "aux"
    return word + ("x" if word.endswith(("eau", "eu", "ou")) and not word.endswith(("bleu", "fou", "trou")) else "s")


def feminine(adjective: str) -> str:
    """Regular feminine of an adjective."""
    for ending, replacement in (("eux", "euse"), ("if", "ive"), ("er", "ère"), ("en", "enne"), ("el", "elle")):
        if adjective.endswith(ending):
            return adjective[: -len(ending)] + replacement
    return adjective if adjective.endswith("e") else adjective + "e"


def agree(participle: str, gender: str, is_plural: bool) -> str:
    """A past participle or regular adjective made to agree: *reçu*, *reçue*, *reçus*, *reçues*."""
    form = participle + "e" if gender == FEMININE else participle
    return plural(form) if is_plural else form


@dataclasses.dataclass(frozen=True)
class Adjective:
    """An adjective in both languages; ``before`` says that it precedes the French noun."""

    english: str
    masculine: str
    feminine: str
    before_vowel: str
    before: bool
    classes: str

    def form(self, gender: str, is_plural: bool, following: str = "") -> str:
        """The form that agrees; ``following`` is the next word, for *bel*, *nouvel*, *vieil*."""
        if gender == FEMININE:
            return self.feminine + ("s" if is_plural else "")
        if is_plural:
            return plural(self.masculine)
        return self.before_vowel if following and elides(following) else self.masculine


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb in both languages; ``present`` holds je, il, nous, vous, ils."""

    base: str
    past: str
    participle: str
    infinitive: str
    present: tuple[str, ...]
    future_stem: str
    past_participle: str
    with_etre: bool = False

    @property
    def third(self) -> str:
        """The English third person singular."""
        if self.base.endswith("y") and self.base[-2] not in "aeiou":
            return self.base[:-1] + "ies"
        return self.base + ("es" if self.base.endswith(("s", "x", "ch", "sh", "o")) else "s")


PERSONS = ("je", "il", "nous", "vous", "ils")
AVOIR = ("ai", "a", "avons", "avez", "ont")
ETRE = ("suis", "est", "sommes", "êtes", "sont")
_FUTURE_ENDINGS = ("ai", "a", "ons", "ez", "ont")


def future(stem: str, person: int) -> str:
    """Simple future: *acheter* + *a*."""
    return stem + _FUTURE_ENDINGS[person]


def present_of(infinitive: str) -> tuple[str, ...]:
    """Regular present of the three groups: je, il, nous, vous, ils."""
    stem = infinitive[:-2]
    if infinitive.endswith("yer"):
        silent = stem[:-1] + "i"
        return (silent + "e", silent + "e", stem + "ons", stem + "ez", silent + "ent")
    if infinitive.endswith("er"):
        soft = {"g": stem + "e", "c": stem[:-1] + "ç"}.get(stem[-1], stem)
        return (stem + "e", stem + "e", soft + "ons", stem + "ez", stem + "ent")
    if infinitive.endswith("ir"):
        return (stem + "is", stem + "it", stem + "issons", stem + "issez", stem + "issent")
    return (stem + "s", stem, stem + "ons", stem + "ez", stem + "ent")


def participle_of(infinitive: str) -> str:
    """Regular past participle."""
    return infinitive[:-2] + {"er": "é", "ir": "i", "re": "u"}[infinitive[-2:]]


def future_stem_of(infinitive: str) -> str:
    """Regular stem of the future."""
    if infinitive.endswith("yer"):
        return infinitive[:-3] + "ier"
    return infinitive[:-1] if infinitive.endswith("re") else infinitive
