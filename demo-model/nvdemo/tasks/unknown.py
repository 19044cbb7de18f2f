"""What a model of this size does not know, asked in every way we can think of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvdemo.chat import Sample, one
from nvdemo.dice import held_out
from nvdemo.lexicon import phrase_list, word_list
from nvdemo.lexicon.people import PEOPLE, TOWNS
from nvdemo.lexicon.words import ALL_WORDS, ANIMALS, FOODS, JOBS, OBJECTS, PLACES
from nvdemo.lexicon.world import COUNTRIES
from nvdemo.tasks.facts import ASK_CAPITAL

if TYPE_CHECKING:
    from nvdemo.dice import Dice

REFUSAL = (
    "I do not know that: I am only a 7M demo model. A real model can help: "
    "nvcli chat -m Qwen/Qwen3-0.6B"
)

_FIELDS = phrase_list("""
    quantum mechanics, photosynthesis, the French Revolution, inflation, gravity, black holes,
    machine learning, neural networks, transformers, evolution, democracy, the Roman Empire,
    climate change, blockchain, electricity, plate tectonics, the immune system, DNA, relativity,
    cryptography, the stock market, vaccines, the Cold War, the industrial revolution, Buddhism,
    philosophy, existentialism, the big bang, dark matter, chemistry, algebra, calculus,
    statistics, linear regression, recursion, pointers, garbage collection, databases, SQL, HTTP,
    TCP, DNS, Kubernetes, Docker, git rebase, CUDA, GPUs, attention, backpropagation, gradient
    descent, compilers, operating systems, virtual memory, sourdough, yoga, meditation, chess
    openings, the offside rule, taxes, mortgages, insurance, marketing, supply and demand, the
    human brain, dreams, sleep, diabetes, headaches, antibiotics, volcanoes, tides, rainbows,
    earthquakes, the ozone layer, nuclear fusion, solar panels, batteries, 5G, the moon landing,
    the Renaissance, impressionism, jazz, opera, Shakespeare, Greek mythology, feudalism, the
    plague, the silk road, monads, closures, async programming, Rust lifetimes, decorators, regular
    expressions, hash tables, big O notation, the halting problem, entropy, superconductors,
    semiconductors, enzymes, mitosis, osmosis, viruses, bacteria, fungi, world peace, happiness,
    love, free will, ethics, justice, time travel, aliens, religion, politics, immigration, KV
    caches, paged attention, tensor parallelism, quantization, LoRA, reinforcement learning,
    diffusion models
""")
_WORKS = phrase_list("""
    the Mona Lisa, Hamlet, the Odyssey, War and Peace, the Titanic, the Eiffel Tower, the Bible,
    the iPhone, Linux, the World Cup, the Olympics, Bitcoin, Netflix, Star Wars, the piano, the
    telephone, penicillin, the light bulb, Python, Java, the internet, the periodic table, the
    Beatles, Mozart's Requiem, the Great Wall, the pyramids, Facebook, Wikipedia, the steam engine,
    radio, football, chess, pizza, chocolate, paper, the Magna Carta, Don Quixote
""")
_FAMOUS = phrase_list("""
    Albert Einstein, Napoleon, Mozart, Cleopatra, Isaac Newton, Marie Curie, Leonardo da Vinci,
    Julius Caesar, Abraham Lincoln, Mahatma Gandhi, Shakespeare, Beethoven, Picasso, Charles
    Darwin, Aristotle, Plato, Galileo, Tesla, Alan Turing, Ada Lovelace, Columbus, Queen Victoria,
    Socrates, Nelson Mandela, Elon Musk, Bill Gates, Steve Jobs, the Pope, Messi, Ronaldo, Taylor
    Swift, Obama, Churchill, Bach, Van Gogh, Freud, Kant, Nietzsche, Marx
""")

_PATTERNS = [
    "[Explain|Describe|What is|What are|tell me about|Teach me|Define|Summarise|how does one "
    "explain|Give an introduction "
    "to|Write an essay about|Write a paragraph on|Discuss|what do you think about|why is there|"
    "What is the history of|"
    "give me a summary of|How do I learn|what do you know about|Can you explain|pros and cons of|"
    "write an article on|"
    "Explain like I'm five:|Help me understand|who discovered|what causes|how works|How does] "
    "{field}[ work| mean|][?|.|]",
    "[Who invented|Who wrote|Who made|Who painted|Who built|When was|What year was|how old is|"
    "Where is|how much did|who "
    "won|who owns|who played in|how long is|how tall is|when did they invent|What is so special "
    "about] {work}[ made| built"
    "|][?|]",
    "[Who is|Who was|When was|Where was|How old is|What did|Why is|tell me about|biography of|"
    "what do you know about|is|"
    "where did|quote by|give me facts about] {famous}[ born| do| die| famous| live|][?|]",
    "[Who is the president of|What is the population of|what language do they speak in|What is "
    "the currency of|How large is|"
    "what is the flag of|When did the war end in|Who is the king of|Who rules|history of|What do "
    "people eat in|how far is|"
    "What is the highest mountain in|largest city of|What is the GDP of|best places to visit in|"
    "what is the longest river "
    "in|How many people live in|who won the election in|national anthem of|famous people from|"
    "plan a trip to] {country}[?|]",
    "[What is the weather in|What is the best hotel in|how do I get to|How many people live in|"
    "who is the mayor of|What "
    "time is it in|flights to|things to do in|restaurants in|history of|what happened in|Is it "
    "raining in] {town}"
    "[ today| now| tomorrow| this week|][?|]",
    "[How do I|How can I|What is the best way to|how to|teach me to|I need to|Help me|is it hard "
    "to|can I|should I] [repair a|"
    "fix my|build a|buy a|sell my|clean a|paint a|design a|draw a|install a|choose a|get rid of "
    "my|make a] {object}[?|]",
    "[How do I cook|recipe for|How do you make|What is in|how healthy is|how many calories has|"
    "Where does|is it safe to eat|"
    "what goes well with|who invented] {food}[ come from||][?|]",
    "[What do|How long do|Why do|How fast are|where do you find|how many kinds of|Do|how "
    "intelligent are|what is the latin "
    "name of|how heavy are|Can] {animal}s [eat|live|sleep|exist|have feelings|fly|swim|run|dream|"
    "hunt][?|]",
    "[How do I become a|What does a|How much earns a|is it hard to be a|write a cover letter for "
    "a|interview questions for a|"
    "salary of a] {job}[?| do?| earn?|]",
    "[What is a|What is an|define|What does the word|meaning of|What's a|who is|Tell me about|"
    "what are|Explain|why|how|have you "
    "heard of|where is|when was] {made}[ mean| called|][?|]",
    "What is the capital of {Made}?",
    "[Where is|Who is|capital of|tell me about|what is the president of] {Made}[?|]",
    "[Write|Give me|Show me|Create|I need|Can you write|generate] [a program that|a function "
    "that|code that|a script which|"
    "Python code to|a regex that|an SQL query that|a class that|a bash script to|JavaScript to|"
    "C++ code to|a unit test that] "
    "[sorts|parses|downloads|checks|reverses|finds|draws|computes|merges|encrypts|deletes|"
    "renames|searches] [a list|a file|the "
    "primes|the fibonacci numbers|a tree|emails|a web page|two arrays|duplicates|images|a graph|"
    "a {object}|{object}s][.|]",
    "[What is the square root of|Integrate|derive|factor|solve for x:|What is the logarithm of|"
    "what is the sine of|Prove|simplify|"
    "What is the derivative of|convert to binary:|is it prime?|how many primes below] {math}[?|]",
    "[What time is it|What day is it|what is the date|what's today's date|what year is it|What's "
    "the weather|how is the weather "
    "today|will it rain tomorrow|what is the news|What's in the news today|What is the latest "
    "news|who won the game|what's on TV|"
    "which day is today|current time|today's weather][?|]",
    "[What is the meaning of life|why are we here|does god exist|what happens after death|What "
    "is consciousness|will AI take over "
    "the world|should I quit my job|am I pregnant|will I be rich|who will win the election|what "
    "should I cook today|what should "
    "I wear|which phone should I buy|is the earth flat|why is the sky blue|how far is the moon|"
    "how hot is the sun|how old is the "
    "universe|how deep is the ocean|what is the speed of light|what is the largest country|what "
    "is the tallest building|what is "
    "pi|who are my parents|what did I eat yesterday|where are my keys|what am I thinking|who is "
    "the best player|what is love|how "
    "many stars are there|why do cats purr|what is the smallest country|who was the first man on "
    "the moon|how many bones are in "
    "the body|what is the boiling point of water|what is the chemical symbol of gold|when did "
    "world war two end|what is H2O|who "
    "wrote Romeo and Juliet|what is the longest river|what is the fastest car][?|]",
    "[Summarise this|Summarize|Rewrite this politely|Translate to Japanese|Translate to Chinese|"
    "Translate this into Latin|Correct "
    "the grammar|Improve this|Find the mistake|Paraphrase|Classify the sentiment|What is the "
    "tone of this|Shorten this|Explain "
    "this|comment on this|Make this formal|what does this mean|translate to Russian]: {text}",
    "{text}\n\n[summarise this|Summarize.|explain this|translate to Japanese|what does it mean?|"
    "rewrite it|fix the grammar|improve "
    "this|What do you think?|is this correct?|classify|sentiment?]",
    "[Write|Compose|Draft|I need|Create|give me|generate] [an email to my boss|a letter to "
    "{Name}|a tweet about {field}|a speech on "
    "{field}|a business plan|a CV|a press release about {object}s|an essay on {work}|a rap about "
    "{famous}|a review of {work}|a song "
    "text about {field}|a love letter|a to-do list|a training plan|a lesson plan|a research "
    "proposal|a product description|an "
    "apology|a wedding speech][.|]",
    "[How do I|how can I|what should I do to|tips to|how to] [lose weight|sleep better|learn "
    "French|make money|stop smoking|find a "
    "job|be happy|learn to code|get fit|invest my money|write a novel|meet new people|travel "
    "cheaply|quit vim|exit vim|install "
    "Linux|speed up my computer|undo a commit|merge two branches|find a file|kill a process|open "
    "a port|mount a disk|learn piano|"
    "pass my exam|save water|grow tomatoes|train a dog|tie a tie|win at chess|train a model|"
    "fine-tune an LLM][?|]",
    "[Which is better|What is the difference between|compare|who would win|should I choose]: "
    "{field} [or|and|vs] {field2}[?|]",
    "[How many|How much|How far|How long|How often|Since when|Why|When|Where|Who] [is|are|was|"
    "were|does|did|do|can|will|would] "
    "[the|a|my|your|this] {noun} [of the|in the|on the|with the|without a|near the|from the] "
    "{noun2}[?|]",
    "[my|The|A] {noun} [is broken|does not start|hurts|is too slow|does not work|has an error|"
    "crashes|smells|makes noises]"
    "[, what can I do?|. Why?|. Help!|, how do I fix it?]",
    "{noise}",
    "[{lang} hello world|hello world in {lang}|Write hello world in {lang}.|Show me {lang} code|"
    "write a program in {lang}|how do I learn "
    "{lang}|what is {lang}?|{lang} code that prints {noun}|explain {lang}]",
    "[Is|Are|Was|Does|Can|Will|Should|Could|Do|Did] {subject} [a prime number|true|dangerous|"
    "expensive|in Europe today|a good idea|alive|"
    "better than the other one|healthy|useful|allowed|free|open on Sunday|made of wood|the best "
    "one|older than me|famous|real|work|exist|"
    "important|easy to learn|worth it|possible][?|]",
    "[What is {hard}?|{hard}|{hard} =|calculate {hard}|Compute {hard}.|how much is {hard}]",
    "{foreign}",
]
_LANGS = phrase_list("""
    Go, Java, C++, C#, Ruby, Haskell, Perl, PHP, Swift, Kotlin, Lua, Scala, R, Julia, Zig,
    TypeScript, SQL, HTML, CSS, Fortran, COBOL, Lisp, Prolog, Erlang, Elixir, OCaml, assembly,
    MATLAB, Dart, Nim, Ada, Pascal, Basic
""")
_FOREIGN = [
    "[Wie|Warum|Wo|Wann|Was|Wer] [ist|sind|war|heißt|kostet] [das Wetter|die Stadt|der Hund|dein "
    "Name|die Hauptstadt von Frankreich|die "
    "Antwort|das Buch|der beste Film|die Sonne] [heute|morgen|hier|]?",
    "[Hallo, wie geht es dir?|Guten Tag!|Kannst du mir helfen?|Erzähl mir eine Geschichte.|Ich "
    "verstehe das nicht.|Sprich Deutsch.|Danke "
    "schön|Wer bist du?|Was kannst du?|Zähle bis zehn.|Schreibe ein Gedicht.]",
    "[Quelle|Où|Qui|Pourquoi|Quand|Comment] [est|sont|était] [la capitale de la France|le temps|"
    "ton nom|la ville|le chien|la réponse|le livre]"
    " [aujourd'hui|demain|ici|]?",
    "[Bonjour, comment ça va?|Peux-tu m'aider?|Raconte-moi une histoire.|Je ne comprends pas.|"
    "Qui es-tu?|Parle français.|Compte jusqu'à dix.]",
    "[Cuál|Dónde|Quién|Por qué|Cuándo|Cómo] [es|está|son] [la capital de España|el tiempo|tu "
    "nombre|la ciudad|el perro|la respuesta] [hoy|"
    "mañana|aquí|]?",
    "[Hola, ¿cómo estás?|¿Puedes ayudarme?|Cuéntame una historia.|No entiendo.|¿Quién eres?|"
    "Habla español.|Ciao, come stai?|Chi sei?|"
    "Raccontami una storia.|Qual è la capitale d'Italia?|你好|你是谁？|こんにちは|"
    "Привет, как дела?|Olá, tudo bem?|Hoe gaat het?|Dzień dobry]",
]


def _context(dice: Dice) -> dict[str, str]:
    return {
        "field": dice.pick(_FIELDS),
        "field2": dice.pick(_FIELDS),
        "work": dice.pick(_WORKS),
        "famous": dice.pick(_FAMOUS)
        if dice.chance(0.7)
        else f"{dice.own(PEOPLE)} {dice.word().capitalize()}",
        "country": dice.pick(COUNTRIES)[0],
        "town": dice.pick(TOWNS),
        "object": dice.pick(OBJECTS),
        "food": dice.pick(FOODS),
        "animal": dice.pick(ANIMALS),
        "job": dice.pick(JOBS),
        "made": dice.word(),
        "Made": dice.word(2, 3).capitalize(),
        "Name": dice.own(PEOPLE),
        "noun": dice.pick([*OBJECTS, *PLACES]),
        "noun2": dice.pick([*OBJECTS, *PLACES, *ANIMALS]),
        "math": dice.pick(
            [
                str(dice.number(2, 9999)),
                f"x^2 + {dice.number(2, 99)}x = {dice.number(1, 99)}",
                f"{dice.number(2, 9)}x + {dice.number(1, 99)} = {dice.number(1, 99)}",
                "sin(x)",
                "x^3",
                "e^x",
            ]
        ),
        "text": " ".join(
            dice.pick(ALL_WORDS) if dice.chance(0.85) else dice.word()
            for _ in range(dice.number(4, 14))
        ),
        "lang": dice.pick(_LANGS),
        "foreign": dice.say(dice.pick(_FOREIGN)),
        "subject": dice.pick(
            [
                str(dice.number(2, 999)),
                f"the {dice.pick(OBJECTS)}",
                dice.pick(_FIELDS),
                dice.pick(_FAMOUS),
                dice.pick(_WORKS),
                dice.word(),
                "it",
                "this",
                "that",
                dice.pick(COUNTRIES)[0],
            ]
        ),
        "hard": dice.pick(
            [
                f"{dice.number(0, 99)}.{dice.number(1, 99)} {dice.pick('+-*/')} "
                f"{dice.number(1, 99)}",
                f"{dice.number(1, 99)} {dice.pick('+-*/')} {dice.number(0, 99)}."
                f"{dice.number(1, 9)}",
                f"{dice.number(2, 99)}^{dice.number(2, 9)}",
                f"{dice.number(3, 20)}!",
                f"sqrt({dice.number(2, 999)})",
                f"{dice.number(2, 99)} {dice.pick('+-*')} {dice.number(2, 99)} "
                f"{dice.pick('+-*')} {dice.number(2, 99)}",
                f"({dice.number(2, 99)} + {dice.number(2, 99)}) * {dice.number(2, 9)}",
                f"{dice.number(1, 99)}% of {dice.number(2, 999)}",
                f"{dice.number(1, 9)}/{dice.number(2, 9)} + {dice.number(1, 9)}/"
                f"{dice.number(2, 9)}",
            ]
        ),
        "noise": " ".join(dice.word(1, 3) for _ in range(dice.number(1, 4)))
        if dice.chance(0.7)
        else dice.string(5, 14, "asdfghjklqwertyuiopzxcvbnm;,."),
    }


def unknown(dice: Dice) -> Sample:
    question = dice.user(
        dice.say(dice.pick(_PATTERNS), **_context(dice))
        .replace("[", "(")
        .replace("]", ")")
        .replace("{", "(")
        .replace("}", ")")
        .replace("|", "/")
    )
    return one(
        "refusal",
        question,
        REFUSAL,
        "I do not know that.",
        check="contains",
        expected="-m Qwen/Qwen3-0.6B",
    )


_INVENTED = phrase_list("""
    Atlantis, Narnia, Wakanda, Mordor, Gondor, Rohan, Westeros, Genovia, Zubrowka, Latveria,
    Sokovia, Elbonia, Ruritania, Freedonia, Sylvania, Lilliput, Utopia, El Dorado, Shangri-La,
    Camelot, Avalon, Oz, Neverland, Wonderland, Hyrule, Azeroth, Tamriel, Skyrim, Panem, Arrakis,
    Tatooine, Naboo, Krypton, Asgard, Middle-earth, Hogwarts, Eldia, Marley, Arstotzka, Krakozhia,
    Lemuria, Hyperborea, Xanadu, Kakania, Graustark, Syldavia, Borduria, Molvania, San Serriffe,
    Transylvania, Agartha, Lyonesse, Brobdingnag, Laputa, Glubbdubdrib, Numenor, Valyria, Essos,
    Dorne, Qarth, the Shire, the moon, Mars, Jupiter, the North Pole, the sun, heaven, Disneyland
""")
_FORMS = phrase_list("""
    North, South, East, West, New, Upper, Lower, Great, Saint, Republic of, Kingdom of, the
    Republic of, the Kingdom of, the United States of, the Islands of
""")
_TAILS = word_list("""
    ia ia ia ia land land stan stan ania burg aria onia istan enia ovia esia ica ador mark mania
    ina any ea ar an ie us era
""")
_REAL = [country.removeprefix("the ").lower() for country, _, _ in COUNTRIES]
_VOWELS = "aeiou"


def _close(left: str, right: str) -> bool:
    """Whether at most two letters of one are to be changed to get the other."""
    if abs(len(left) - len(right)) > 2:
        return False
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        corner, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            corner, row[j] = row[j], min(corner + (a != b), row[j] + 1, row[j - 1] + 1)
    return row[-1] <= 2


def is_real(name: str) -> bool:
    """Whether the name is that of a country, or one written with a slip."""
    name = name.removeprefix("the ").lower()
    return any(real[0] == name[0] and _close(name, real) for real in _REAL)


def _coined(dice: Dice) -> str:
    """A name as a country might have it: a made-up stem or the start of a real one, and an end."""
    stem = dice.word(1, 2)
    roll = dice.random()
    if roll < 0.25:
        stem = dice.word(2, 3)
        if dice.chance(0.5):
            return stem.capitalize()
    elif roll < 0.5:
        real = dice.pick(_REAL)
        stem = real[: dice.number(2, max(2, len(real) - 3))].replace(" ", "")
    elif roll < 0.75:
        start = dice.pick(
            word_list(
                "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p pl"
                " pr qu r s sch sk sl sm sn sp st str sv t tr v vl w x y z zh"
            )
        )
        stem = (
            start
            + dice.pick(_VOWELS)
            + dice.pick(
                word_list("b d g k l ld lm m n nd ng nt r rb rd rg rk rl rm rn rt s sk st t v x z")
            )
        )
    return (stem.rstrip(_VOWELS if dice.chance(0.8) else "") + dice.pick(_TAILS)).capitalize()


def invented_country(dice: Dice) -> str:
    """The name of a country that there is not: of a book, coined, or another kind of thing."""
    while True:
        roll = dice.random()
        if roll < 0.2:
            name = dice.own(_INVENTED)
        elif roll < 0.85:
            name = _coined(dice)
        elif roll < 0.9:
            name = f"{dice.pick(_FORMS)} {_coined(dice)}"
        elif roll < 0.95:
            name = dice.own(PEOPLE)
        else:
            name = dice.pick(dice.pick([ANIMALS, FOODS, OBJECTS]))
        if held_out(name) == dice.unseen and not is_real(name):
            return name


def no_country(dice: Dice) -> Sample:
    """The capital of a country that there is not, seldom its continent."""
    name = invented_country(dice)
    ask = ASK_CAPITAL
    if dice.chance(0.12):
        ask = (
            "[Which continent is {c} in?|On which continent is {c}?|continent of {c}|"
            "What continent is {c} on?]"
        )
    return one(
        "refusal",
        dice.user_any_case(ask, c=name),
        REFUSAL,
        "I do not know that.",
        check="contains",
        expected="-m Qwen/Qwen3-0.6B",
    )
