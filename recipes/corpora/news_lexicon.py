"""Names and sentence patterns of the news grammar.

People and companies are invented; cities, countries and international bodies are real. In the patterns: ``{p}`` is
the person in the news, ``{s}`` the surname alone, ``{q}`` and ``{t}`` those of a second person, ``{o}`` and ``{u}``
organisations, ``{c}`` and ``{d}`` cities, ``{n}`` and ``{m}`` their countries, ``{a}`` the nationality that goes with
``{n}``, ``{e}`` an event, ``{k}`` a number, ``{w}`` a weekday.
"""

from __future__ import annotations

FIRST_NAMES = tuple(
    (
        "Laura Daniel Maria Peter Susan Robert Helen David Emma Thomas Julia Martin Sarah Michael Anna Richard Claire "
        "Steven Nicole Andrew Rachel James Linda Kevin Sophie Paul Karen Brian Diana George Alice Frank Monica Edward "
        "Teresa Simon"
    ).split()
)
SURNAMES = tuple(
    (
        "Bennett Carter Hughes Morgan Fischer Keller Novak Rossi Martinez Larsen Jensen Dubois Moreau Silva Costa "
        "Ramirez Petrov Nowak Lindberg Sullivan Murphy Campbell Fraser Griffin Holloway Barnes Coleman Dawson Ellison "
        "Fletcher Gardner Harper Jenkins Lambert Mitchell Norton Osborne Parker Quinn Reynolds Sanders Thornton Vaughn "
        "Watkins Zimmerman Tanaka"
    ).split()
)
PLACES = tuple(
    tuple(line.split("/"))
    for line in (
        "Paris/France/French;Lyon/France/French;Berlin/Germany/German;Hamburg/Germany/German;Rome/Italy/Italian"
        ";Milan/Italy/Italian;Madrid/Spain/Spanish;Barcelona/Spain/Spanish;Lisbon/Portugal/Portuguese;Vienna/Austria/Austrian"
        ";Warsaw/Poland/Polish;Amsterdam/Netherlands/Dutch;Athens/Greece/Greek;Dublin/Ireland/Irish;Oslo/Norway/Norwegian"
        ";Stockholm/Sweden/Swedish;Helsinki/Finland/Finnish;Copenhagen/Denmark/Danish;Brussels/Belgium/Belgian"
        ";Geneva/Switzerland/Swiss;Budapest/Hungary/Hungarian;Istanbul/Turkey/Turkish;Cairo/Egypt/Egyptian"
        ";Lagos/Nigeria/Nigerian;Nairobi/Kenya/Kenyan;Tokyo/Japan/Japanese;Seoul/South Korea/Korean;Mumbai/India/Indian"
        ";Sydney/Australia/Australian;Toronto/Canada/Canadian;Chicago/United States/American"
        ";Boston/United States/American;Santiago/Chile/Chilean;Lima/Peru/Peruvian;Bogota/Colombia/Colombian"
        ";London/United Kingdom/British"
    ).split(";")
)
COMPANIES = tuple(
    (
        "Norwell Motors;Atlas Energy;Brightwater Bank;Meridian Airlines;Halden Steel;Pinecrest Hotels;"
        "Sterling Insurance;Vantage Telecom;Northgate Railways;Kestrel Shipping;Lakeside Pharmaceuticals;"
        "Granite Construction;Solara Electronics;Westbrook Technologies"
    ).split(";")
)
BODIES = tuple(
    (
        "Greenpeace;Amnesty International;the Red Cross;the World Bank;the European Commission;the United Nations;"
        "UNESCO;UNICEF;the World Health Organization;Oxfam;the European Parliament;Interpol;the Supreme Court;"
        "the Ministry of Health;the Ministry of Finance;the Central Bank;the European Union"
    ).split(";")
)
AID = tuple("Greenpeace;the Red Cross;Oxfam;UNICEF;the United Nations;the World Health Organization".split(";"))
PARTIES = tuple(
    ("the Labour Party;the Green Party;the Conservative Party;the Democratic Party;the Socialist Party").split(";")
)
COURTS = tuple("the Supreme Court;the European Court of Justice;the Ministry of Justice".split(";"))
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "merger": (COMPANIES, COMPANIES),
    "strike": (COMPANIES, BODIES),
    "trial": (COMPANIES, COURTS),
    "railway": (COMPANIES, AID),
    "election": (PARTIES, BODIES),
    "flood": (AID, BODIES),
    "rescue": (AID, BODIES),
    "summit": (AID, PARTIES),
    "research": (BODIES, COMPANIES),
    "prize": (BODIES, BODIES),
    "museum": (BODIES, COMPANIES),
    "match": (BODIES, BODIES),
}
"""Which organisations the first and the second of a story may be."""
LINKED_BY_RAIL = 12
"""The first so many places lie on one continent, and railways run between them."""
EVENTS = tuple(
    "the World Cup;the Olympic Games;World War II;the Cannes Film Festival;the Cold War;the Super Bowl"
    ";the Tour de France;the Champions League".split(";")
)
WEEKDAYS = tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split())
COUNTS = tuple("20 30 40 50 60 80 100 200 300 400 500 600 900".split())

KINDS: dict[str, dict[str, tuple[str, ...]]] = {
    "merger": {
        "lead": (
            "{o} said on {w} that it will buy its rival {u} for {k} million dollars,"
            " in the largest deal of its kind in {n}.",
            "The {a} company {o} has agreed to take over {u}, its managers announced in {c} on {w}.",
            "{u} will be sold to {o}, a group from {c}, after talks that lasted for months.",
        ),
        "detail": (
            "{p}, the chief executive of {o}, told reporters in {c} that no jobs would be lost.",
            "{p}, who runs {o}, promised to keep the offices in {d} open.",
            "Shares in {u} rose sharply after the news.",
            "The two companies together employ {k} thousand people in {n} and {m}.",
        ),
        "brief": ("{o} is buying a rival company.", "A company in {c} has agreed to buy a rival."),
        "full": (
            "{o} of {c} will buy {u}, its chief executive {p} said.",
            "{p} announced in {c} that {o} is taking over {u}.",
            "{u} is being sold to {o}, a company from {n} led by {p}.",
        ),
    },
    "election": {
        "lead": (
            "{p} has won the election for mayor of {c}, beating {q} by a narrow margin.",
            "Voters in {c} chose {p} as their new mayor on {w}, ending a long campaign against {q}.",
            "The people of {c} have elected {p}, a former teacher from {d}, as mayor.",
        ),
        "detail": (
            "{s} was supported by {o} and promised cheaper housing and better buses.",
            "About {k} thousand people took part in the vote, more than ever before in {n}.",
            "{q} accepted the result and wished the winner good luck.",
            "Observers from {u} said that the vote was free and fair.",
        ),
        "brief": ("{p} is the new mayor.", "{c} has a new mayor after a close vote."),
        "full": (
            "{p} beat {q} and becomes mayor of {c} with the support of {o}.",
            "{p}, backed by {o}, was elected mayor of {c} in {n}.",
            "Voters in {c} elected {p} ahead of {q}.",
        ),
    },
    "prize": {
        "lead": (
            "{p}, a {a} writer who lives in {c}, received a major prize on {w} for a novel about {e}.",
            "The {a} author {p} has won the literary prize of {o} at a ceremony in {c}.",
            "A novel about {e} has earned {p} one of the richest prizes in {n}.",
        ),
        "detail": (
            "{s} thanked readers in {m} and said that the book took ten years to write.",
            "The jury, led by {q}, called the novel a brave and moving work.",
            "The prize is worth {k} thousand euros and is paid by {o}.",
            "{s} was born in {d} and moved to {c} as a child.",
        ),
        "brief": ("A novel about {e} won a prize.", "The writer {p} has won a prize."),
        "full": (
            "The {a} writer {p} won the prize of {o} for a novel about {e}.",
            "{p} received a prize in {c} from a jury led by {q}.",
            "{p}, who was born in {d}, won a prize in {c} for a book about {e}.",
        ),
    },
    "flood": {
        "lead": (
            "Heavy rain has flooded large parts of {c} and forced {k} families to leave their homes,"
            " officials in {n} said on {w}.",
            "Rescue teams from {o} are working in {c} after the worst floods in {n} for a generation.",
            "Floods cut off several villages near {c} on {w}, and {o} sent food and blankets.",
        ),
        "detail": (
            "{p} of {o} said that clean water was running out.",
            "{q}, who lost a shop in the flood, spent the night on a roof.",
            "The government of {m} offered helicopters and medicine.",
            "The river rose by two metres in a single night, and the road to {d} was closed.",
        ),
        "brief": ("Floods have hit {c}.", "Heavy rain forced many families to leave their homes."),
        "full": (
            "Floods in {c} forced {k} families to flee, and {p} of {o} warned that water was running out.",
            "{o} is helping victims of floods in {c}, while {m} offered helicopters.",
            "{p} of {o} said that floods near {c} were the worst in {n} for years.",
        ),
    },
    "match": {
        "lead": (
            "{p} scored twice as {n} beat {m} on {w} in {c} and moved closer to {e}.",
            "{n} defeated {m} in front of a full stadium in {c}, with two goals from {p}.",
            "A late goal by {p} gave {n} a win over {m} in {c} on {w}.",
        ),
        "detail": (
            "The coach, {q}, praised the young players and the {a} supporters.",
            "{s}, who plays for a club in {d}, left the field with an injury.",
            "About {k} thousand supporters travelled from {d} for the match.",
            "{n} now needs one more point to reach {e}.",
        ),
        "brief": ("{n} won a football match.", "Two late goals decided the match in {c}."),
        "full": (
            "{p} scored as {n} beat {m} in {c}.",
            "{n} defeated {m} thanks to {p}, and the coach {q} praised the team.",
            "A goal by {p} in {c} brought {n} closer to {e}.",
        ),
    },
    "strike": {
        "lead": (
            "Workers at {o} in {c} went on strike on {w} over pay, stopping production for the first time in years.",
            "{k} employees of {o} walked out in {c} on {w} to demand higher wages.",
            "A strike at {o} has closed its largest factory in {n}.",
        ),
        "detail": (
            "{p}, the leader of the union, said that talks in {d} had failed.",
            "{q}, a manager at {o}, called the strike a mistake.",
            "The {a} government asked {u} to help the two sides.",
            "Customers in {m} may have to wait longer for their orders.",
        ),
        "brief": ("Workers at {o} are on strike.", "A strike over pay has closed a factory."),
        "full": (
            "Workers of {o} in {c} are on strike, and {p} said that talks in {d} had failed.",
            "{p} leads a strike at {o} in {c}, which the manager {q} called a mistake.",
            "A strike at {o} in {n} goes on after talks between {p} and {q} failed.",
        ),
    },
    "trial": {
        "lead": (
            "A court in {c} has sentenced {p}, a former director of {o}, to {k} months in prison.",
            "{p}, who once managed {o}, went on trial in {c} on {w} for fraud.",
            "Judges in {c} heard on {w} how {p} took money from {o} for years.",
        ),
        "detail": (
            "The lawyer {q} said that {s} would appeal to {u}.",
            "The money was hidden in accounts in {m}, the judges were told.",
            "Police in {d} found the documents two years ago.",
            "The case has shocked many people in {n}.",
        ),
        "brief": ("A former director was found guilty of fraud.", "{p} is on trial for fraud."),
        "full": (
            "A court in {c} tried {p}, a former director of {o}, for hiding money in {m}.",
            "{p} took money from {o}, a court in {c} heard, and the lawyer {q} will appeal.",
            "The former director of {o}, {p}, was tried in {c} after police in {d} found documents.",
        ),
    },
    "museum": {
        "lead": (
            "A new museum about {e} opened in {c} on {w}, with {k} paintings and photographs.",
            "{p}, the {a} painter, opened a large exhibition in {c} on {w}.",
            "Visitors waited for hours in {c} to see the new museum designed by {p}.",
        ),
        "detail": (
            "The architect {q} said that the building was inspired by the old harbour of {d}.",
            "{o} gave {k} million euros for the project.",
            "Some of the pictures were lent by collectors in {m}.",
            "{s} lives in {d} and rarely speaks to the press.",
        ),
        "brief": ("A new museum opened in {c}.", "Visitors can see paintings by {p}."),
        "full": (
            "A museum paid for by {o} opened in {c} with works by {p}.",
            "The {a} painter {p} shows new works in {c} in a building by {q}.",
            "{p} opened a museum in {c}, with pictures lent from {m} and money from {o}.",
        ),
    },
    "summit": {
        "lead": (
            "Ministers from {n} and {m} met in {c} on {w} to sign an agreement on trade.",
            "{n} and {m} have agreed to cut taxes on food after two days of talks in {c}.",
            "The leaders of {n} and {m} ended their meeting in {c} on {w} without an agreement.",
        ),
        "detail": (
            "{p}, the {a} minister, called the talks open and honest.",
            "{q}, who spoke for {o}, asked both countries to do more for the climate.",
            "The next meeting will take place in {d} in the spring.",
            "About {k} members of {u} protested outside the building.",
        ),
        "brief": ("Two countries held talks in {c}.", "{n} held talks about trade."),
        "full": (
            "{n} and {m} held talks in {c}, which the minister {p} called open and honest.",
            "The {a} minister {p} met colleagues from {m} in {c}, while {u} protested.",
            "{n} and {m} talked about trade in {c}, and {q} of {o} asked for more.",
        ),
    },
    "rescue": {
        "lead": (
            "The {a} climber {p} was rescued on {w} after three nights in the mountains of {m}.",
            "{p}, a sailor from {c}, has been found alive off the coast of {m} after {k} hours at sea.",
            "A helicopter of {o} saved {p} and {q} from a burning boat near {c} on {w}.",
        ),
        "detail": (
            "Doctors in {d} said that {s} was tired but healthy.",
            "{q}, who led the search, thanked the crews from {n}.",
            "{o} warned people not to travel in bad weather.",
            "The family of {s} in {c} said that they had never given up hope.",
        ),
        "brief": ("{p} was rescued.", "A helicopter saved a traveller in bad weather."),
        "full": (
            "{p} from {c} was rescued in {m} by a team under {q}.",
            "The {a} traveller {p} was saved by {o} and taken to {d}.",
            "{o} rescued {p} in {m}, and doctors in {d} said that the traveller was healthy.",
        ),
    },
    "research": {
        "lead": (
            "Scientists in {c} have found a new way to treat malaria, a study paid for by {o} showed on {w}.",
            "A team led by {p} in {c} has built a battery that lasts for {k} hours.",
            "{p}, a {a} scientist, presented a new medicine at a conference in {c} on {w}.",
        ),
        "detail": (
            "{q}, who took part in the study in {d}, said that more tests were needed.",
            "{u} wants to produce it next year.",
            "The tests were made with {k} volunteers in {n} and {m}.",
            "{s} has worked in {c} for twenty years.",
        ),
        "brief": ("Scientists presented a new discovery.", "A team in {c} has made a discovery."),
        "full": (
            "{p} and a team in {c} made a discovery that {u} wants to produce.",
            "The {a} scientist {p} presented work done in {c} and paid for by {o}.",
            "A discovery by {p} was tested in {n} and {m}, but {q} wants more tests.",
        ),
    },
    "railway": {
        "lead": (
            "{o} will open a fast railway line between {c} and {d} next year, the company said on {w}.",
            "Trains between {c} and {d} will soon be twice as fast, {o} announced on {w}.",
            "{n} and {m} will be linked by a new railway line built by {o}.",
        ),
        "detail": (
            "{p}, who manages the project, said that the journey would take two hours.",
            "{q} of {u} fears that the line will harm the forests.",
            "The project will cost {k} million euros and create many jobs in {n}.",
            "The first tunnels near {c} are already finished.",
        ),
        "brief": ("{o} plans a new railway line.", "A fast railway line will open next year."),
        "full": (
            "{o} is building a railway line from {c} to {d}, managed by {p}.",
            "A new line of {o} will link {c} and {d}, but {q} fears for the forests.",
            "{p} of {o} said that trains between {n} and {m} would be faster.",
        ),
    },
}

COMMON = (
    '"We are working hard, and we will not stop," {p} said.',
    '"Nobody expected this," {q} told a newspaper in {d}.',
    '"It is a great day for {n}," {t} said.',
    "A spokesman for {u} declined to comment.",
    "{t} is expected to travel to {d} later this week.",
    "Newspapers in {m} wrote about it on their front pages.",
    "Many people in {c} still remember {e}.",
    "Similar news came from {d} a month ago.",
    "{s} will speak to the press again on {w}.",
    "More details are expected before the end of the month.",
)

SECOND = (
    "{q} spoke about it in {d}.",
    "{u} declined to comment.",
    "Newspapers in {m} wrote about it.",
    "{q} called it a great day for {n}.",
    "More details are expected soon.",
)
