"""Plain words by category, and the facts that need no more than a pair."""

from __future__ import annotations

from pathlib import Path

from nvdemo.lexicon import pair_table, word_list

# Words of the vocabulary; `python -m nvdemo.tokenizer` writes them.
PIECES = Path(__file__).with_name("pieces.txt")
VOCABULARY_WORDS = PIECES.read_text(encoding="utf-8").split()
LOWER_PIECES = [word for word in VOCABULARY_WORDS if word.islower()]

ANIMALS = word_list("""
    ant badger bat bear beaver bee bird buffalo butterfly camel cat chicken cow crab crow deer dog
    dolphin donkey dove duck eagle elephant falcon fish fly fox frog giraffe goat goose hamster
    hare hawk hedgehog hippo horse kangaroo kitten koala lamb leopard lion lizard lobster monkey
    mole moose mouse octopus otter owl ox panda parrot peacock penguin pig pigeon pony puppy rabbit
    raccoon rat raven robin rooster seal shark sheep snail snake sparrow spider squirrel swan tiger
    toad turkey turtle walrus weasel whale wolf worm zebra
""")
FRUITS = word_list("""
    apple apricot banana blackberry blueberry cherry coconut date fig grape grapefruit kiwi lemon
    lime mango melon nectarine orange papaya peach pear pineapple plum raspberry strawberry
    watermelon
""")
VEGETABLES = word_list("""
    bean beet broccoli cabbage carrot celery corn cucumber garlic leek lettuce mushroom onion pea
    pepper potato pumpkin radish spinach tomato turnip
""")
COLOURS = word_list("""
    red blue green yellow orange purple pink brown black white grey gold silver violet turquoise
    beige crimson
""")
OBJECTS = word_list("""
    bag ball basket bed bell bicycle blanket boat book bottle bowl box bridge broom brush bucket
    bus button cake camera candle car carpet chair clock cloud coat coin computer cup curtain desk
    door drum engine feather fence flag flower fork garden gate glass glove guitar hammer hat house
    key kite knife ladder lamp letter lock map mirror needle nest newspaper paint paper pen pencil
    phone piano picture pillow pipe plane plate pocket pot radio ring road robe roof rope ruler
    sail scarf scissors shelf ship shirt shoe shovel soap sock spoon stamp star stone stove string
    suitcase sword table tent ticket towel tower toy train tree truck umbrella vase violin wagon
    wallet watch wheel whistle window wire
""")
FOODS = word_list("""
    bread butter cheese chocolate coffee cookie cream egg flour honey jam juice milk noodle oil
    pancake pasta pizza pie rice salad salt sandwich sauce soup stew sugar tea toast yogurt
""")
JOBS = word_list("""
    actor artist baker barber builder butcher captain carpenter chef clerk cook dancer dentist
    doctor driver farmer fisher gardener guard hunter judge lawyer librarian mechanic miner
    musician nurse painter pilot plumber poet potter sailor scientist singer smith soldier tailor
    teacher waiter weaver writer
""")
PLACES = word_list("""
    airport bakery bank barn beach castle cave church city coast desert farm field forest garage
    harbour hill hospital hotel island kitchen lake library market meadow mill mountain museum
    office palace park port river school shop stable station theatre valley village zoo
""")
VERBS = word_list("""
    ask bake bring build buy call carry catch clean climb close cook count cut dance draw dream
    drink drive eat fall feed find fix follow give grow help hide hold jump keep kick laugh learn
    lift listen look lose make mark meet mix move open paint pick plan plant play print pull push
    read rest ride ring run save search sell send serve share sing sit sleep sort speak spell stand
    start stop store swim take talk teach tell test throw touch track turn update visit wait walk
    wash watch win work write
""")
ADJECTIVES = word_list("""
    bright brave calm clean clever cold cool dark deep dry early easy fast fine fresh gentle happy
    hard heavy hot kind large late lazy light little long loud new noisy old plain proud quick
    quiet rare rich round sharp short shy simple slow small smooth soft strange strong sweet tall
    tiny warm wet wide wild wise young
""")
NATURE = word_list("""
    autumn breeze dawn dust evening fire fog frost ice lightning moon morning night ocean rain sand
    sea shadow sky snow spring storm summer sun sunset thunder water wave weather wind winter
""")
ALL_WORDS = sorted(
    {
        *ANIMALS,
        *FRUITS,
        *VEGETABLES,
        *COLOURS,
        *OBJECTS,
        *FOODS,
        *JOBS,
        *PLACES,
        *VERBS,
        *ADJECTIVES,
        *NATURE,
    }
)
CATEGORIES = {
    "animal": ANIMALS,
    "fruit": FRUITS,
    "vegetable": VEGETABLES,
    "colour": COLOURS,
    "food": FOODS,
    "job": JOBS,
    "place": PLACES,
}
PLURALS = {
    "animal": "animals",
    "fruit": "fruits",
    "vegetable": "vegetables",
    "colour": "colours",
    "food": "foods",
    "job": "jobs",
    "place": "places",
}

DAYS = word_list("""
    Monday Tuesday Wednesday Thursday Friday Saturday Sunday
""")
MONTHS = word_list("""
    January February March April May June July August September October November December
""")
MONTH_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
SEASONS = ["spring", "summer", "autumn", "winter"]
PLANETS = word_list("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune")
NUMBER_WORDS = word_list("""
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
    sixteen seventeen eighteen nineteen twenty
""")
ORDINALS = word_list("""
    first second third fourth fifth sixth seventh eighth ninth tenth
""")

OPPOSITES = [
    tuple(pair.split(":"))
    for pair in word_list("""
    hot:cold big:small tall:short fast:slow up:down left:right day:night black:white good:bad
    happy:sad open:closed full:empty hard:soft heavy:light high:low in:out inside:outside
    early:late old:young rich:poor strong:weak wet:dry clean:dirty long:short dark:light near:far
    thick:thin wide:narrow loud:quiet first:last above:below before:after easy:difficult love:hate
    win:lose start:finish begin:end push:pull buy:sell true:false yes:no north:south east:west
    alive:dead awake:asleep brave:afraid bright:dim deep:shallow sharp:blunt smooth:rough
    sweet:bitter front:back top:bottom more:less many:few always:never everything:nothing
    friend:enemy summer:winter laugh:cry give:take remember:forget arrive:leave polite:rude
    safe:dangerous war:peace hello:goodbye success:failure modern:ancient tight:loose
""")
]

SOUNDS = pair_table("""
    dog:woof cat:meow cow:moo sheep:baa pig:oink duck:quack horse:neigh lion:roar frog:croak
    owl:hoot rooster:cock-a-doodle-doo bee:buzz snake:hiss mouse:squeak wolf:howl goose:honk
    turkey:gobble donkey:hee-haw crow:caw chicken:cluck bird:tweet goat:bleat bear:growl
    elephant:trumpet pigeon:coo monkey:chatter tiger:roar cricket:chirp
""")

BABIES = pair_table("""
    dog:puppy cat:kitten cow:calf sheep:lamb pig:piglet duck:duckling horse:foal goat:kid
    chicken:chick goose:gosling lion:cub bear:cub wolf:cub fox:cub swan:cygnet frog:tadpole
    deer:fawn kangaroo:joey owl:owlet hare:leveret
""")

HOMES = pair_table("""
    bird:nest bee:hive dog:kennel horse:stable spider:web rabbit:burrow bear:den lion:den cow:barn
    ant:anthill pig:sty beaver:lodge fox:den eagle:nest fish:water
""")

LEGS = pair_table("""
    dog:4 cat:4 cow:4 horse:4 bird:2 chicken:2 spider:8 ant:6 bee:6 octopus:8 fly:6 snake:0 fish:0
    elephant:4 duck:2 crab:10 butterfly:6 human:2 pig:4 sheep:4 lion:4 frog:4
""")

COLOUR_OF = pair_table("""
    sky:blue grass:green snow:white banana:yellow coal:black blood:red sun:yellow carrot:orange
    milk:white leaf:green night:black rose:red lemon:yellow chocolate:brown pumpkin:orange
    cloud:white tomato:red frog:green elephant:grey flamingo:pink strawberry:red salt:white
""")

SIZES = word_list("""
    ant bee mouse hamster rat squirrel hedgehog rabbit cat fox dog goat sheep wolf pig lion cow
    horse giraffe elephant whale
""")
WEIGHTS = word_list("""
    feather leaf coin pencil apple book brick chair bicycle piano car truck house mountain
""")
SPEEDS = word_list("""
    snail turtle duck chicken pig human bear dog rabbit horse lion
""")

PLURAL_OF = pair_table("""
    cat:cats dog:dogs child:children mouse:mice foot:feet tooth:teeth goose:geese man:men
    woman:women person:people ox:oxen sheep:sheep fish:fish leaf:leaves knife:knives wolf:wolves
    city:cities baby:babies box:boxes bus:buses house:houses tree:trees potato:potatoes
    tomato:tomatoes berry:berries book:books apple:apples key:keys dish:dishes fox:foxes
    cherry:cherries hero:heroes deer:deer half:halves story:stories watch:watches
""")

PAST_OF = pair_table("""
    go:went eat:ate see:saw run:ran write:wrote take:took give:gave come:came make:made say:said
    find:found think:thought buy:bought bring:brought sing:sang swim:swam drink:drank drive:drove
    fly:flew know:knew grow:grew speak:spoke break:broke sleep:slept teach:taught catch:caught
    sell:sold tell:told feel:felt leave:left keep:kept build:built send:sent win:won lose:lost
    walk:walked play:played jump:jumped begin:began fall:fell sit:sat stand:stood
""")

TRANSLATIONS = {
    row.split(":")[0]: row.split(":")[1:]
    for row in """
hello:bonjour:hallo:hola:ciao
goodbye:au revoir:auf Wiedersehen:adiós:arrivederci
thank you:merci:danke:gracias:grazie
please:s'il vous plaît:bitte:por favor:per favore
yes:oui:ja:sí:sì
no:non:nein:no:no
cat:chat:Katze:gato:gatto
dog:chien:Hund:perro:cane
house:maison:Haus:casa:casa
water:eau:Wasser:agua:acqua
bread:pain:Brot:pan:pane
milk:lait:Milch:leche:latte
book:livre:Buch:libro:libro
sun:soleil:Sonne:sol:sole
moon:lune:Mond:luna:luna
friend:ami:Freund:amigo:amico
love:amour:Liebe:amor:amore
tree:arbre:Baum:árbol:albero
red:rouge:rot:rojo:rosso
blue:bleu:blau:azul:blu
green:vert:grün:verde:verde
one:un:eins:uno:uno
two:deux:zwei:dos:due
three:trois:drei:tres:tre
apple:pomme:Apfel:manzana:mela
horse:cheval:Pferd:caballo:cavallo
fish:poisson:Fisch:pez:pesce
night:nuit:Nacht:noche:notte
day:jour:Tag:día:giorno
good morning:bonjour:guten Morgen:buenos días:buongiorno
""".strip().splitlines()
}
LANGUAGES = ["French", "German", "Spanish", "Italian"]
