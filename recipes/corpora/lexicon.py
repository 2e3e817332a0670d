"""Words of the translation grammar: nouns, adjectives, verbs and topics, English beside French.

Classes of nouns, by letter: p person, a animal, d document or idea, e event, f food, t thing, c clothing, b building
or place, v vehicle, g what grows, s what is scored. A verb lists the classes that it takes as objects, an adjective
those that it describes, so that what is composed is grammatical and mostly sensible.
"""

from __future__ import annotations

import dataclasses
import functools

from corpora import french

_ADJECTIVES = """
small|petit||<|aftcbvg;big|grand||<|atbvg;young|jeune||<|pa;old|vieux|vieille,vieil|<|patcbvg
new|nouveau|nouvelle,nouvel|<|pdtcbve;beautiful|beau|belle,bel|<|atcbvgs;good|bon|bonne|<|pfde;pretty|joli||<|tcb
long|long|longue|<|de;large|gros|grosse|<|aft;red|rouge||>|tcvfg;blue|bleu||>|tcv;green|vert||>|tcvf
white|blanc|blanche|>|atcvb;black|noir||>|atcv;yellow|jaune||>|tcvf;grey|gris||>|atcvb;brown|brun||>|atc
clean|propre||>|tcbv;dirty|sale||>|tcv;heavy|lourd||>|tf;light|léger||>|tc;empty|vide||>|bv;broken|cassé||>|t
expensive|cher|chère|>|ftcvb;modern|moderne||>|tbv;round|rond||>|t;square|carré||>|t;ripe|mûr||>|f
fresh|frais|fraîche|>|f;sweet|sucré||>|f;delicious|délicieux||>|f;important|important||>|de;difficult|difficile||>|de
useful|utile||>|dt;clear|clair||>|d;simple|simple||>|dt;interesting|intéressant||>|deb;urgent|urgent||>|d
serious|sérieux||>|dp;public|public|publique|>|deb;European|européen||>|dp;French|français||>|pdvb
German|allemand||>|pv;Italian|italien||>|pfv;Spanish|espagnol||>|pb;foreign|étranger||>|pv;tired|fatigué||>|pa
happy|heureux||>|p;famous|célèbre||>|pb;patient|patient||>|p;polite|poli||>|p;brave|courageux||>|pa
experienced|expérimenté||>|p;worried|inquiet|inquiète|>|p;wild|sauvage||>|a;quiet|tranquille||>|ab;hungry|affamé||>|a
huge|énorme||>|atb;narrow|étroit||>|b;ancient|ancien|ancienne|>|b;fast|rapide||>|v;dangerous|dangereux||>|abv
necessary|nécessaire||>|d;annual|annuel|annuelle|>|e;local|local||>|e;national|national||>|ed
"""

_VERBS = """
adopt|adopter;reject|rejeter|rejette rejette rejetons rejetez rejettent|rejetter|rejeté
support|soutenir|soutiens soutient soutenons soutenez soutiennent|soutiendr|soutenu;examine|examiner;present|présenter
sign|signer;approve approved|approuver;propose proposed|proposer;prepare prepared|préparer
withdraw withdrew withdrawn|retirer;read read|lire|lis lit lisons lisez lisent|lir|lu;publish|publier
write wrote written|écrire|écris écrit écrivons écrivez écrivent|écrir|écrit;finish|terminer
choose chose chosen|choisir;learn|apprendre|apprends apprend apprenons apprenez apprennent|apprendr|appris
forget forgot forgotten|oublier;lose lost|perdre;correct|corriger;borrow|emprunter;copy copied|copier
buy bought|acheter|achète achète achetons achetez achètent|achèter|acheté;sell sold|vendre;eat ate eaten|manger
cut cut|couper;bring brought|apporter;order|commander;taste tasted|goûter;wash|laver;find found|trouver
keep kept|garder;count|compter;visit|visiter;book|réserver;miss|manquer
take took taken|prendre|prends prend prenons prenez prennent|prendr|pris;cross|traverser
see saw seen|voir|vois voit voyons voyez voient|verr|vu;photograph|photographier;carry carried|porter;rent|louer
show showed shown|montrer;plant|planter;water|arroser;follow|suivre|suis suit suivons suivez suivent|suivr|suivi
feed fed|nourrir;watch|regarder;protect|protéger|protège protège protégeons protégez protègent|protéger|protégé
hear heard|entendre;catch caught|attraper;draw drew drawn|dessiner
send sent|envoyer|envoie envoie envoyons envoyez envoient|enverr|envoyé
receive received|recevoir|reçois reçoit recevons recevez reçoivent|recevr|reçu;repair|réparer
replace replaced|remplacer;test|tester;check|vérifier;cancel cancelled|annuler;organise organised|organiser
close closed|fermer;open|ouvrir|ouvre ouvre ouvrons ouvrez ouvrent|ouvrir|ouvert;pay paid|payer;win won|gagner
play|jouer;score scored|marquer;clean|nettoyer;paint|peindre|peins peint peignons peignez peignent|peindr|peint
move moved|déplacer;break broke broken|casser;hide hid hidden|cacher;give gave given|donner;treat|soigner
recommend|recommander
build built|construire|construis construit construisons construisez construisent|construir|construit
renovate renovated|rénover;invite invited|inviter;meet met|rencontrer;help|aider;thank|remercier
call|appeler|appelle appelle appelons appelez appellent|appeller|appelé;explain|expliquer;compare compared|comparer
translate translated|traduire|traduis traduit traduisons traduisez traduisent|traduir|traduit;collect|ramasser
save saved|sauver;use used|utiliser;defend|défendre;arrive arrived|+arriver
leave left|+partir|pars part partons partez partent|partir|parti
come came come|+venir|viens vient venons venez viennent|viendr|venu
return|+revenir|reviens revient revenons revenez reviennent|reviendr|revenu
go went gone|+aller|vais va allons allez vont|ir|allé;wait|attendre;work|travailler
sleep slept|dormir|dors dort dormons dormez dorment|dormir|dormi;walk|marcher;sing sang sung|chanter
speak spoke spoken|parler;dance danced|danser
"""

_PEOPLE = """
minister|ministre|m;member|membre|m;commissioner|commissaire|m;president|président|m;delegate|délégué|m
rapporteur|rapporteur|m;expert|expert|m;ambassador|ambassadeur|m;teacher|professeur|m;pupil|élève|m;student|étudiant|m
child/children|enfant|m;girl|fille|f;boy|garçon|m;cook|cuisinier|m;baker|boulanger|m;customer|client|m
farmer|agriculteur|m;waiter|serveur|m;neighbour|voisin|m;traveller|voyageur|m;tourist|touriste|m;driver|chauffeur|m
pilot|pilote|m;passenger|passager|m;guide|guide|m;friend|ami|m;gardener|jardinier|m;hunter|chasseur|m
engineer|ingénieur|m;manager|directeur|m;employee|employé|m;secretary|secrétaire|f;worker|ouvrier|m;lawyer|avocat|m
player|joueur|m;coach|entraîneur|m;runner|coureur|m;champion|champion|m;referee|arbitre|m;brother|frère|m
sister|sœur|f;cousin|cousin|m;uncle|oncle|m;aunt|tante|f;doctor|médecin|m;nurse|infirmière|f;patient|patient|m
surgeon|chirurgien|m;mayor|maire|m;policeman/policemen|policier|m;resident|habitant|m;architect|architecte|m
journalist|journaliste|m;shopkeeper|commerçant|m;painter|peintre|m;woman/women|femme|f;man/men|homme|m
actress|actrice|f;singer|chanteuse|f;musician|musicien|m;soldier|soldat|m;thief/thieves|voleur|m
"""

_THINGS = """
report|rapport|m|d;amendment|amendement|m|d;resolution|résolution|f|d;proposal|proposition|f|d;directive|directive|f|d
question|question|f|d;text|texte|m|d;agreement|accord|m|d;treaty|traité|m|d;measure|mesure|f|d;law|loi|f|d
programme|programme|m|d;book|livre|m|d;letter|lettre|f|d;exercise|exercice|m|d;poem|poème|m|d;story|histoire|f|d
word|mot|m|d;article|article|m|d;sentence|phrase|f|d;contract|contrat|m|d;file|dossier|m|d;project|projet|m|d
message|message|m|d;invoice|facture|f|d;idea|idée|f|d;solution|solution|f|d;problem|problème|m|d;answer|réponse|f|d
map|carte|f|d;plan|plan|m|d;treatment|traitement|m|d;meeting|réunion|f|e;debate|débat|m|e;lesson|leçon|f|e
exam|examen|m|e;match|match|m|e;race|course|f|e;concert|concert|m|e;festival|festival/festivals|m|e
conference|conférence|f|e;tournament|tournoi|m|e;operation|opération|f|e;exhibition|exposition|f|e;apple|pomme|f|f
egg|œuf|m|f;cake|gâteau|m|f;potato/potatoes|pomme de terre/pommes de terre|f|f;onion|oignon|m|f;carrot|carotte|f|f
lemon|citron|m|f;tomato/tomatoes|tomate|f|f;orange|orange|f|f;cheese|fromage|m|f;pear|poire|f|f;sandwich|sandwich|m|f
biscuit|biscuit|m|f;melon|melon|m|f;pencil|crayon|m|t;notebook|cahier|m|t;bottle|bouteille|f|t;glass|verre|m|t
plate|assiette|f|t;cup|tasse|f|t;box|boîte|f|t;knife/knives|couteau|m|t;basket|panier|m|t;ticket|billet|m|t
suitcase|valise|f|t;bag|sac|m|t;photo|photo|f|t;machine|machine|f|t;computer|ordinateur|m|t;phone|téléphone|m|t
printer|imprimante|f|t;key|clé|f|t;window|fenêtre|f|t;door|porte|f|t;chair|chaise|f|t;table|table|f|t;lamp|lampe|f|t
bed|lit|m|t;clock|horloge|f|t;toy|jouet|m|t;mirror|miroir|m|t;curtain|rideau|m|t;picture|tableau|m|t
medal|médaille|f|t;ball|ballon|m|t;drawing|dessin|m|t;guitar|guitare|f|t;shirt|chemise|f|c;coat|manteau|m|c
dress|robe|f|c;hat|chapeau|m|c;jacket|veste|f|c;scarf/scarves|écharpe|f|c;dog|chien|m|a;cat|chat|m|a;horse|cheval|m|a
cow|vache|f|a;lamb|agneau|m|a;rabbit|lapin|m|a;bird|oiseau|m|a;fox|renard|m|a;wolf/wolves|loup|m|a;duck|canard|m|a
mouse/mice|souris|f|a;goat|chèvre|f|a;bear|ours|m|a;hen|poule|f|a;tree|arbre|m|g;flower|fleur|f|g;rose|rose|f|g
goal|but|m|s;point|point|m|s;song|chanson|f|d;hotel|hôtel|m|b;museum|musée|m|b;bridge|pont|m|b;castle|château|m|b
island|île|f|b;village|village|m|b;room|chambre|f|b;house|maison|f|b;shop|magasin|m|b;school|école|f|b
church|église|f|b;street|rue|f|b;garden|jardin|m|b;office|bureau|m|b;apartment|appartement|m|b
restaurant|restaurant|m|b;farm|ferme|f|b;river|rivière|f|b;hospital|hôpital|m|b;road|route|f|b;car|voiture|f|v
bicycle|vélo|m|v;boat|bateau|m|v;train|train|m|v;bus|bus|m|v;plane|avion|m|v;truck|camion|m|v
"""

_TOPICS = """
parliament
who: minister, member, commissioner, president, delegate, rapporteur, expert, ambassador
what: report, amendment, resolution, proposal, directive, question, text, agreement, treaty, measure, law, programme,
  meeting, debate
does: adopt:d reject:d support:d examine:d present:d sign:=agreement+treaty+text+proposal approve:d
  propose:=amendment+resolution+text+agreement+measure+law withdraw:d publish:d cancel:e organise:e compare:d defend:d
where: in Brussels|à Bruxelles; in Strasbourg|à Strasbourg; in the chamber|dans l'hémicycle;
  before the vote|avant le vote; after the debate|après le débat; during the session|pendant la session;
  in parliament|au parlement

school
who: teacher, pupil, student, child, girl, boy, friend
what: book, letter, exercise, poem, story, word, sentence, pencil, notebook, drawing, song, lesson, exam, question,
  picture, answer
does: read:d write:d finish:de choose:dt learn:=poem+song+word+lesson forget:dt correct:=exercise+sentence+exam+answer
  copy:d borrow:t lose:t show:dt explain:d translate:d prepare:de find:dt
where: at school|à l'école; in the library|à la bibliothèque; in the classroom|dans la salle de classe;
  in the playground|dans la cour; before the holidays|avant les vacances; with the teacher|avec le professeur

kitchen
who: cook, baker, customer, waiter, neighbour, woman, man, friend, farmer
what: apple, egg, cake, potato, onion, carrot, lemon, tomato, orange, cheese, pear, sandwich, biscuit, melon, bottle,
  glass, plate, cup, knife, basket
does: buy:ft sell:f eat:f prepare:f cut:f bring:ft order:f taste:f wash:ft find:ft keep:ft count:ft break:t use:ft
  give:ft
where: at the market|au marché; in the kitchen|dans la cuisine; on the table|sur la table;
  at the restaurant|au restaurant; in the shop|dans le magasin; for dinner|pour le dîner;
  for the guests|pour les invités

travel
who: traveller, tourist, driver, pilot, passenger, guide, friend, journalist
what: ticket, suitcase, bag, photo, map, hotel, museum, bridge, castle, island, village, train, bus, plane, boat, room
does: visit:b book:=ticket+room+hotel miss:=train+bus+plane+boat take:v lose:t cross:=bridge+village+island see:bv
  photograph:bv carry:=suitcase+bag find:tb rent:vb show:tb choose:tb forget:t buy:t
where: at the station|à la gare; near the port|près du port; at the airport|à l'aéroport;
  during the trip|pendant le voyage; in Italy|en Italie; in Portugal|au Portugal; in Paris|à Paris;
  on the beach|sur la plage

nature
who: farmer, gardener, hunter, child, girl, boy, guide
what: tree, flower, rose, lamb, rabbit, bird, duck, mouse, goat, cow, horse, hen, bear, river
does: see:agb plant:g water:g follow:a feed:a watch:ag protect:ag hear:a catch:a find:ag draw:ag count:ag save:a
where: in the garden|dans le jardin; in the forest|dans la forêt; near the river|près de la rivière;
  in the field|dans le champ; on the mountain|sur la montagne; behind the house|derrière la maison;
  under the bridge|sous le pont

animals
who: dog, cat, wolf, fox, horse, duck, goat, bird, bear
what: lamb, rabbit, bird, mouse, hen, duck, goat, child, hunter, tree, flower
does: see:apg follow:ap watch:ap hear:ap catch:=rabbit+bird+mouse+hen+duck find:agp protect:=lamb+child+goat+duck
where: in the garden|dans le jardin; in the forest|dans la forêt; near the farm|près de la ferme;
  in the snow|dans la neige; behind the trees|derrière les arbres; during the night|pendant la nuit

office
who: engineer, manager, employee, secretary, worker, lawyer, customer, expert
what: contract, file, project, message, invoice, meeting, conference, machine, computer, phone, printer, key, plan,
  solution, problem, report
does: send:d receive:d repair:t replace:t sign:=contract+report+plan test:t check:dt prepare:de cancel:e organise:e
  close:=file pay:=invoice present:d find:dt explain:d use:t compare:d
where: at the office|au bureau; in the factory|à l'usine; before the deadline|avant la date limite;
  on the first floor|au premier étage; for the company|pour l'entreprise; during the meeting|pendant la réunion

sport
who: player, coach, runner, champion, referee, journalist, friend
what: match, race, tournament, goal, point, medal, ball, exercise, plan
does: win:=match+race+tournament+point+medal lose:=match+race+point+ball play:=match score:=goal+point watch:e
  organise:e cancel:e prepare:ed receive:t show:t miss:e finish:e
where: at the stadium|au stade; in the city centre|dans le centre-ville; during the season|pendant la saison;
  before the final|avant la finale; in the rain|sous la pluie; without help|sans aide

home
who: brother, sister, cousin, uncle, aunt, neighbour, friend, painter
what: window, door, chair, table, lamp, bed, clock, toy, mirror, curtain, picture, shirt, coat, dress, hat, jacket,
  scarf, box, guitar
does: clean:tc open:=window+door+box close:=window+door+curtain+box repair:t
  paint:=window+door+chair+table+bed+toy+picture sell:tc buy:tc move:t break:t replace:t wash:c hide:tc find:tc
  give:tc choose:tc bring:tc forget:c
where: in the bedroom|dans la chambre; in the attic|dans le grenier; in the living room|dans le salon;
  at home|à la maison; for the party|pour la fête; with care|avec soin; near the window|près de la fenêtre

health
who: doctor, nurse, surgeon, expert, patient
what: treatment, operation, bed, machine, patient, report, question, child, woman, man, soldier, meeting
does: examine:p treat:p see:p call:p help:p prepare:et recommend:d receive:pd check:td cancel:e thank:p explain:d
where: at the hospital|à l'hôpital; in the village|dans le village; with patience|avec patience;
  during the night|pendant la nuit; after the accident|après l'accident; in the waiting room|dans la salle d'attente

city
who: mayor, policeman, resident, architect, journalist, shopkeeper, worker, tourist, thief
what: house, shop, school, church, street, bridge, garden, apartment, restaurant, hospital, road, car, bicycle, truck,
  hotel, exhibition
does: build:=house+bridge+school+church+hotel+hospital+road close:b open:=shop+school+restaurant+hotel+hospital
  visit:be paint:b photograph:bv sell:v buy:v renovate:b clean:bv see:bv cross:=street+bridge+garden+road find:bv
  repair:v
where: in the city|dans la ville; in the suburbs|en banlieue; near the square|près de la place; in Lyon|à Lyon;
  on the avenue|sur l'avenue; behind the town hall|derrière la mairie; in the old town|dans la vieille ville

culture
who: actress, singer, musician, painter, journalist, student, woman, man
what: song, concert, festival, picture, exhibition, guitar, photo, poem, story, article, book, drawing
does: prepare:ed present:de organise:e cancel:e sell:t show:t buy:t write:d finish:d choose:dt watch:e read:d
  translate:d
where: at the theatre|au théâtre; at the museum|au musée; in the square|sur la place; in Berlin|à Berlin;
  in Spain|en Espagne; before the show|avant le spectacle; for the public|pour le public
"""


@dataclasses.dataclass(frozen=True)
class Noun:
    """A noun in both languages, with its French gender and its class."""

    singular: str
    plural: str
    french_singular: str
    french_plural: str
    gender: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Topic:
    """What may be said together: who acts, what is acted upon, and where."""

    name: str
    agents: tuple[Noun, ...]
    objects: tuple[Noun, ...]
    actions: tuple[tuple[french.Verb, tuple[Noun, ...]], ...]
    places: tuple[tuple[str, str], ...]


def english_plural(noun: str) -> str:
    """Regular English plural."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")


def make_noun(entry: str, kind: str = "p") -> Noun:
    """Read ``english[/plural]|french[/plural]|gender[|class]``."""
    english, foreign, gender, *rest = entry.split("|")
    one, _, many = english.partition("/")
    un, _, plusieurs = foreign.partition("/")
    return Noun(one, many or english_plural(one), un, plusieurs or french.plural(un), gender, rest[0] if rest else kind)


def make_verb(entry: str) -> french.Verb:
    """Read ``base [past [participle]]|infinitive[|five present forms|future stem|participle]``; ``+`` marks être."""
    english, infinitive, *irregular = entry.split("|")
    base, *forms = english.split()
    past = forms[0] if forms else base + ("d" if base.endswith("e") else "ed")
    with_etre, infinitive = infinitive.startswith("+"), infinitive.lstrip("+")
    present = tuple(irregular[0].split()) if irregular else french.present_of(infinitive)
    stem = irregular[1] if irregular else french.future_stem_of(infinitive)
    participle = irregular[2] if irregular else french.participle_of(infinitive)
    return french.Verb(base, past, forms[-1] if forms else past, infinitive, present, stem, participle, with_etre)


def make_adjective(entry: str) -> french.Adjective:
    """Read ``english|masculine|[feminine[,form before a vowel]]|< or >|classes``."""
    english, masculine, extra, side, classes = entry.split("|")
    feminine, _, rest = extra.partition(",")
    before_vowel = rest.partition(",")[0]
    return french.Adjective(
        english, masculine, feminine or french.feminine(masculine), before_vowel or masculine, side == "<", classes
    )


def _entries(table: str) -> list[str]:
    return table.strip().replace("\n", ";").split(";")


@functools.lru_cache(maxsize=1)
def nouns() -> dict[str, Noun]:
    """Every noun by its English singular."""
    found = [make_noun(entry) for entry in _entries(_PEOPLE) + _entries(_THINGS)]
    return {noun.singular: noun for noun in found}


@functools.lru_cache(maxsize=1)
def verbs() -> dict[str, french.Verb]:
    """Every verb by its English base form."""
    return {verb.base: verb for verb in map(make_verb, _entries(_VERBS))}


@functools.lru_cache(maxsize=32)
def adjectives(kind: str) -> tuple[french.Adjective, ...]:
    """The adjectives that may describe nouns of a class."""
    return tuple(each for each in map(make_adjective, _entries(_ADJECTIVES)) if kind and kind in each.classes)


@functools.lru_cache(maxsize=1)
def topics() -> tuple[Topic, ...]:
    """Every topic, its verbs already paired with the objects that they take."""
    return tuple(_topic(block) for block in _TOPICS.strip().split("\n\n"))


def _topic(block: str) -> Topic:
    """Read a block: the name, then who acts, on what, by which verbs (with classes or ``=`` named objects), where."""
    name, who, what, does, where = (line.partition(": ")[2] or line for line in block.replace("\n  ", " ").split("\n"))
    things = tuple(nouns()[word] for word in what.split(", "))
    paired = []
    for action in does.split():
        verb, _, kinds = action.partition(":")
        named = kinds[1:].split("+") if kinds.startswith("=") else []
        suited = tuple(thing for thing in things if (thing.singular in named if named else thing.kind in kinds))
        paired.append((verbs()[verb], suited))
    people = tuple(nouns()[word] for word in who.split(", "))
    places = tuple((place.split("|")[0], place.split("|")[1]) for place in where.split("; "))
    return Topic(name, people, things, tuple(paired), places)
