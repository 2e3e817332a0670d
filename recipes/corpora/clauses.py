"""Clauses of the translation grammar: who does what, when and where, and how clauses combine."""

from __future__ import annotations

import dataclasses
import random

from corpora import french
from corpora.french import FEMININE, MASCULINE
from corpora.lexicon import Noun, Topic, adjectives, nouns, verbs
from corpora.phrases import (
    PRONOUNS,
    Phrase,
    Text,
    conjugate,
    counted_phrase,
    draw_value,
    join,
    numeral,
    passive,
    plain_phrase,
    to_be,
)

_UNITS = (
    ("minute", "minute", "minute", FEMININE),
    ("hour", "heure", "heure", FEMININE),
    ("day", "jour", "jour", MASCULINE),
    ("week", "semaine", "semaine", FEMININE),
    ("month", "mois", "mois", MASCULINE),
    ("year", "an", "année", FEMININE),
)
_PLAIN_TIMES: dict[str, tuple[Text, ...]] = {
    "past": (
        ("yesterday", "hier"),
        ("last week", "la semaine dernière"),
        ("last year", "l'année dernière"),
        ("this morning", "ce matin"),
        ("on Monday", "lundi"),
        ("last summer", "l'été dernier"),
    ),
    "present": (
        ("today", "aujourd'hui"),
        ("every day", "chaque jour"),
        ("now", "maintenant"),
        ("on Sundays", "le dimanche"),
    ),
    "future": (
        ("tomorrow", "demain"),
        ("next week", "la semaine prochaine"),
        ("next year", "l'année prochaine"),
        ("tonight", "ce soir"),
        ("on Friday", "vendredi"),
        ("soon", "bientôt"),
    ),
}
_DESTINATIONS: tuple[Text, ...] = (
    ("the station", "la gare"),
    ("the airport", "l'aéroport"),
    ("the hotel", "l'hôtel"),
    ("the village", "le village"),
    ("the office", "le bureau"),
    ("the market", "le marché"),
    ("the beach", "la plage"),
    ("the castle", "le château"),
    ("the hospital", "l'hôpital"),
    ("the school", "l'école"),
)
_AMOUNTS: tuple[tuple[str, str, str, Text], ...] = (
    ("bottle", "bouteille", FEMININE, ("water", "eau")),
    ("bottle", "bouteille", FEMININE, ("wine", "vin")),
    ("glass", "verre", MASCULINE, ("milk", "lait")),
    ("cup", "tasse", FEMININE, ("coffee", "café")),
    ("cup", "tasse", FEMININE, ("tea", "thé")),
    ("kilo", "kilo", MASCULINE, ("potatoes", "pommes de terre")),
    ("kilo", "kilo", MASCULINE, ("oranges", "oranges")),
    ("litre", "litre", MASCULINE, ("oil", "huile")),
    ("slice", "tranche", FEMININE, ("bread", "pain")),
    ("basket", "panier", MASCULINE, ("apples", "pommes")),
    ("box", "boîte", FEMININE, ("eggs", "œufs")),
    ("pair", "paire", FEMININE, ("shoes", "chaussures")),
)
_GRADED = (
    "old",
    "beautiful",
    "important",
    "difficult",
    "useful",
    "interesting",
    "tired",
    "happy",
    "heavy",
    "dangerous",
    "dirty",
)
_TENSES = ("past", "past", "past", "perfect", "present", "present", "future", "must", "can", "want", "going")


@dataclasses.dataclass(frozen=True)
class Speaker:
    """What a sentence is made from: a source of chance, a topic, and how often a noun is counted."""

    rng: random.Random
    topic: Topic
    share: float

    def chance(self, probability: float) -> bool:
        """True with a probability."""
        return self.rng.random() < probability

    def phrase(self, noun: Noun, style: str = "any", is_subject: bool = False) -> Phrase:
        """A noun phrase, counted or not."""
        if self.chance(self.share):
            return counted_phrase(noun, self.rng, style, is_subject)
        return plain_phrase(noun, self.rng, style)

    def subject(self) -> Phrase:
        """Who acts: a pronoun or someone of the topic."""
        if self.chance(0.25):
            return self.rng.choice(PRONOUNS)
        return self.phrase(self.rng.choice(self.topic.agents), is_subject=True)

    def place(self, share: float = 0.3) -> Text:
        """Where, or nothing."""
        return self.rng.choice(self.topic.places) if self.chance(share) else ("", "")

    def tense(self) -> str:
        """Any tense."""
        return self.rng.choice(_TENSES)


def time_of(speaker: Speaker, tense: str) -> Text:
    """When, in agreement with the tense."""
    group = "past" if tense in ("past", "perfect") else "present" if tense in ("present", "can", "want") else "future"
    if not speaker.chance(speaker.share):
        return ("today", "aujourd'hui") if tense == "perfect" else speaker.rng.choice(_PLAIN_TIMES[group])
    rng = speaker.rng
    if tense != "perfect" and rng.random() < 0.3:
        value = draw_value(rng)
        clock = ("o'clock", "heures" if value > 1 else "heure")
        before = rng.choice((("at", "à"), ("before", "avant"), ("after", "après")))
        return join(before, numeral(value, FEMININE), clock)
    unit, one, long, gender = rng.choice(_UNITS)
    form = 1 if tense == "perfect" else rng.randrange(2)
    value = draw_value(rng, 2 if form else 1)
    count = numeral(value, MASCULINE if one == "an" else gender)
    english, short = unit + ("s" if value > 1 else ""), french.plural(one) if value > 1 else one
    long = french.plural(long)
    last, following = ("dernières", "prochaines") if gender == FEMININE else ("derniers", "prochains")
    if group == "past":
        if form:
            return join(("during the last", "pendant les"), count, (english, f"{last} {long}"))
        return join(("", "il y a"), count, (f"{english} ago", short))
    if group == "future":
        if form:
            return join(("during the next", "pendant les"), count, (english, f"{following} {long}"))
        return join(("in", "dans"), count, (english, short))
    every = "toutes les" if gender == FEMININE and one != "an" else "tous les"
    return join(("every", every), numeral(max(value, 2), gender), (f"{unit}s", french.plural(one)))


def predicate(speaker: Speaker, subject: Phrase, tense: str) -> Text:
    """Verb, object or objects, and perhaps a place."""
    rng = speaker.rng
    if tense in ("past", "present", "future") and speaker.chance(0.08):
        tense = f"not {tense}"
    verb, things = rng.choice(speaker.topic.actions)
    first = rng.choice(things)
    found = speaker.phrase(first, "definite" if tense.startswith("not") else "any")
    text = found.text
    others = [thing for thing in things if thing is not first]
    if others and not tense.startswith("not") and speaker.chance(0.15):
        text = join(text, ("and", "et"), speaker.phrase(rng.choice(others)).text)
    if verb.base in ("give", "send", "show", "explain", "sell", "bring", "recommend") and speaker.chance(0.4):
        receiver = speaker.phrase(rng.choice(speaker.topic.agents), "definite")
        text = join(text, ("to", "à"), receiver.text)
    return join(conjugate(verb, tense, subject), text, speaker.place())


def clause(speaker: Speaker, tense: str | None = None, timed: bool = True) -> Text:
    """A whole clause, perhaps with an expression of time at either end."""
    tense = tense or speaker.tense()
    subject = speaker.subject()
    text = join(subject.text, predicate(speaker, subject, tense))
    if timed and speaker.chance(0.3):
        when = time_of(speaker, tense)
        return join((when[0] + ",", when[1] + ","), text) if speaker.chance(0.35) else join(text, when)
    return text


def moving(speaker: Speaker) -> Text:
    """Someone goes somewhere, or does something for a while."""
    rng, tense = speaker.rng, speaker.rng.choice(("past", "past", "perfect", "present", "future", "must"))
    subject = speaker.subject()
    if speaker.chance(0.5):
        base, preposition = rng.choice(
            (
                ("arrive", ("at", "à")),
                ("leave", ("", "de")),
                ("come", ("to", "à")),
                ("return", ("to", "à")),
                ("go", ("to", "à")),
            )
        )
        goal = join(preposition, rng.choice(_DESTINATIONS))
        when = time_of(speaker, tense) if speaker.chance(0.6) else ("", "")
        return join(subject.text, conjugate(verbs()[base], tense, subject), goal, when)
    verb = verbs()[rng.choice(("wait", "work", "sleep", "walk", "sing", "speak", "dance"))]
    value = draw_value(rng)
    unit, one, _, gender = rng.choice(_UNITS[:3])
    how_long = join(
        ("for", "pendant"), numeral(value, gender), (unit + "s" * (value > 1), french.plural(one) if value > 1 else one)
    )
    lasting = how_long if speaker.chance(speaker.share) else ("all day", "toute la journée")
    return join(subject.text, conjugate(verb, tense, subject), speaker.place(0.4), lasting)


def existing(speaker: Speaker) -> Text:
    """There is, there are."""
    rng = speaker.rng
    thing = speaker.phrase(rng.choice(speaker.topic.objects + speaker.topic.agents), "indefinite")
    verb = rng.choice(
        ((("is", "are"), "il y a"), (("was", "were"), "il y avait"), (("will be", "will be"), "il y aura"))
    )
    text = join((f"there {verb[0][thing.is_plural]}", verb[1]), thing.text)
    if speaker.chance(0.2):
        text = join(text, ("and", "et"), speaker.phrase(rng.choice(speaker.topic.objects), "indefinite").text)
    return join(text, speaker.place(0.8))


def describing(speaker: Speaker) -> Text:
    """Something is somehow, the French adjective agreeing."""
    rng = speaker.rng
    noun = rng.choice([each for each in speaker.topic.objects + speaker.topic.agents if each.kind not in "gs"])
    thing = speaker.phrase(noun, "definite", is_subject=True)
    adjective = rng.choice([each for each in adjectives(noun.kind) if each.english not in thing.text[0]])
    form = adjective.form(thing.gender, thing.is_plural)
    very = ("very", "très") if adjective.english in _GRADED and speaker.chance(0.5) else ("", "")
    link = to_be(rng.choice(("present", "present", "past", "future")), thing)
    return join(thing.text, link, very, (adjective.english, form))


def suffering(speaker: Speaker) -> Text:
    """The passive, with or without the one who acts."""
    rng, tense = speaker.rng, speaker.rng.choice(("past", "past", "future"))
    verb, things = rng.choice(speaker.topic.actions)
    thing = speaker.phrase(rng.choice(things), is_subject=True)
    text = join(thing.text, passive(verb, tense, thing))
    if speaker.chance(0.6):
        text = join(text, ("by", "par"), speaker.phrase(rng.choice(speaker.topic.agents)).text)
    return join(text, time_of(speaker, tense)) if speaker.chance(0.35) else text


def owning(speaker: Speaker) -> Text:
    """To have, to need, possession in both languages."""
    rng, subject = speaker.rng, speaker.subject()
    person, third = subject.person, subject.is_third_singular
    thing = rng.choice([each for each in speaker.topic.objects if each.kind not in "sgp"])
    if speaker.chance(0.35):
        wanted = counted_phrase(thing, rng) if speaker.share else plain_phrase(thing, rng, "definite")
        return join(subject.text, ("needs" if third else "need", f"{french.AVOIR[person]} besoin de"), wanted.text)
    if speaker.chance(0.4):
        family = [nouns()[word] for word in ("brother", "sister", "cousin", "friend", "aunt", "uncle", "neighbour")]
        one, two = rng.sample(family, 2)
        owned = join(speaker.phrase(one, "indefinite").text, ("and", "et"), speaker.phrase(two, "indefinite").text)
    else:
        owned = speaker.phrase(thing, "indefinite").text
    have = rng.choice(
        (
            ("has" if third else "have", french.AVOIR[person]),
            ("had", ("avais", "avait", "avions", "aviez", "avaient")[person]),
            ("will have", french.future("aur", person)),
        )
    )
    return join(subject.text, have, owned, speaker.place(0.15))


def buying(speaker: Speaker) -> Text:
    """An amount of something: *trois bouteilles d'eau*."""
    rng, tense, subject = speaker.rng, speaker.tense(), speaker.subject()
    one, un, gender, what = rng.choice(_AMOUNTS)
    noun = Noun(one, one + ("es" if one.endswith(("s", "x")) else "s"), un, french.plural(un), gender, "")
    amount = join(speaker.phrase(noun, "indefinite").text, ("of", "de"), what)
    verb = verbs()[rng.choice(("buy", "order", "bring", "sell", "find", "prepare", "keep"))]
    text = join(subject.text, conjugate(verb, tense, subject), amount)
    return join(text, time_of(speaker, tense)) if speaker.chance(0.4) else text


def relating(speaker: Speaker) -> Text:
    """A relative clause; after *que* the participle agrees with what comes before."""
    rng = speaker.rng
    verb, things = rng.choice(speaker.topic.actions)
    if speaker.chance(0.5):
        who = speaker.phrase(rng.choice(speaker.topic.agents), "the", is_subject=True)
        pronoun = ("that" if who.kind == "a" else "who", "qui")
        relative = join(pronoun, conjugate(verb, "past", who), speaker.phrase(rng.choice(things)).text)
        return join(who.text, relative, predicate(speaker, who, speaker.tense()))
    thing = speaker.phrase(rng.choice(things), "the", is_subject=True)
    doer = rng.choice(PRONOUNS) if speaker.chance(0.6) else speaker.phrase(rng.choice(speaker.topic.agents))
    agreed = french.agree(verb.past_participle, thing.gender, thing.is_plural)
    relative = join(("that", "que"), doer.text, (verb.past, f"{french.AVOIR[doer.person]} {agreed}"))
    adjective = rng.choice(adjectives(thing.kind))
    form = adjective.form(thing.gender, thing.is_plural)
    return join(thing.text, relative, to_be("present", thing), (adjective.english, form))


def asking(speaker: Speaker) -> Text:
    """A question, formal."""
    rng = speaker.rng
    verb, things = rng.choice(speaker.topic.actions)
    thing = speaker.phrase(rng.choice(things)).text
    you = PRONOUNS[4]
    auxiliary, participle = ("êtes" if verb.with_etre else "avez"), verb.past_participle
    kind = rng.randrange(4)
    if kind == 0:
        return join((f"did you {verb.base}", f"{auxiliary}-vous {participle}"), thing, speaker.place(), ("?", "?"))
    if kind == 1:
        return join((f"can you {verb.base}", f"pouvez-vous {verb.infinitive}"), thing, speaker.place(), ("?", "?"))
    if kind == 2:
        foreign = conjugate(verb, "future", you)[1]
        return join(
            (f"will you {verb.base}", f"est-ce que vous {foreign}"), thing, time_of(speaker, "future"), ("?", "?")
        )
    who = speaker.phrase(rng.choice(speaker.topic.agents), "definite")
    foreign = conjugate(verb, "past", who)[1]
    return join(("did", "est-ce que"), who.text, (verb.base, foreign), thing, ("?", "?"))


def urging(speaker: Speaker) -> Text:
    """A request, an exhortation, or what is important to do."""
    rng = speaker.rng
    verb, things = rng.choice(speaker.topic.actions)
    thing = speaker.phrase(rng.choice(things)).text
    lead = rng.choice(
        (
            (f"please {verb.base}", f"veuillez {verb.infinitive}"),
            (f"let us {verb.base}", verb.present[2]),
            (f"it is important to {verb.base}", f"il est important de {verb.infinitive}"),
            (f"it is necessary to {verb.base}", f"il est nécessaire de {verb.infinitive}"),
            (f"it is impossible to {verb.base}", f"il est impossible de {verb.infinitive}"),
        )
    )
    return join(lead, thing, speaker.place())


def linking(speaker: Speaker) -> Text:
    """Two clauses: because, but, and, when, if, so, says that, in order to."""
    rng = speaker.rng
    kind = rng.choice(("because", "but", "and", "when", "if", "says", "think", "purpose", "so"))
    if kind == "if":
        return join(("if", "si"), _comma(clause(speaker, "present", False)), clause(speaker, "future", False))
    if kind == "when":
        word = ("when", rng.choice(("quand", "lorsque")))
        return join(clause(speaker, "past", False), word, clause(speaker, "past", False))
    if kind == "says":
        who = speaker.phrase(rng.choice(speaker.topic.agents), is_subject=True)
        says = ("says that", "dit que") if who.is_third_singular else ("say that", "disent que")
        return join(who.text, says, clause(speaker))
    if kind == "think":
        lead = rng.choice(
            (("I think that", "je pense que"), ("we know that", "nous savons que"), ("he says that", "il dit que"))
        )
        return join(lead, clause(speaker))
    if kind == "purpose":
        verb, things = rng.choice(speaker.topic.actions)
        aim = join((f"to {verb.base}", f"pour {verb.infinitive}"), speaker.phrase(rng.choice(things)).text)
        return join(clause(speaker, timed=False), aim)
    because = rng.choice(("parce que", "parce que", "car"))
    links = {"because": ("because", because), "but": ("but", "mais"), "and": ("and", "et"), "so": ("so", "donc")}
    tense = rng.choice(("past", "past", "present"))
    first = clause(speaker, tense, False)
    return join(_comma(first) if kind in ("but", "so") else first, links[kind], clause(speaker, tense))


def _comma(text: Text) -> Text:
    return text[0] + ",", text[1] + ","
