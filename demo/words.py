"""Word lists of the generated corpus.

Every word is one token of the demo tokenizer when a space precedes it. Names are split into two disjoint
sets. The six evaluated attributes (code, key, pet, job, meal, gift) belong only to `TRAIN_NAMES` in training
documents; in evaluation documents every question is about `EVAL_NAMES`. In training an evaluation name
appears in filler, rolls and neighbor links, and owns three attributes that are never evaluated (boat, school,
horse): its embedding is trained as input and as output, but no evaluated attribute is ever stored under it.
"""


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _split(
    """Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nathan Olivia Peter Quinn
    Rachel Samuel Teresa Ulrich Victor Wendy Xavier Yvonne Zachary Adrian Bella Connor Diana Edward
    Fiona George Hannah Isaac Julia Kevin Laura Martin Nora Oscar Paula Quentin Robert Sophia Thomas
    Ursula Vincent Walter Zoe Arthur Beatrice Charles Daphne Elliot Felicity Gordon Helen Ivan Joanna
    Keith Lydia Marcus Naomi Owen Phoebe Ralph Sandra Trevor Vanessa William Yolanda Aaron Brenda Caleb
    Doris Ethan Flora Gilbert Hazel Ian Jasmine Kurt Linda Mason Nicole Orlando Priscilla Raymond Stella
    Tobias Valerie Wesley Agnes Bruno Cynthia Dennis Esther Felix Gloria Harold Ingrid Jerome Kathleen
    Lucas Miriam Norman Ophelia Philip Rosa Simon Tamara Vera Warren Alfred Bridget Clara Douglas Elena
    Floyd Gwen Hugo Isabel Joel Kyle Leah Miles Nadia Otto Penelope Roger Sylvia Theo Veronica Wallace
    Amelia Barry Cecilia Dean Eva Fred Gina Howard Ivy Jonas Kim Lewis Mabel Neil Olga Patrick Rita
    Stuart Tina Vernon Anton Berta Cora Dora Edgar Frida Gustav Hilda Igor Judith Karl Lena Mona Nils
    Oleg Petra Ramon Sonia Tony Ugo Wanda Yara Zelda Abel Bianca Cyrus Dina Emil Fanny Greta Hector Inga
    Jorge Kira Lars Marta Nico Omar Pablo Rufus Silas Tessa Uma Viola Wilma Yuri Ada Boris Celia"""
)
EVAL_NAMES = NAMES[4::6]
TRAIN_NAMES = tuple(n for n in NAMES if n not in EVAL_NAMES)

CITIES = _split(
    """Paris London Berlin Madrid Rome Vienna Prague Dublin Lisbon Oslo Athens Warsaw Cairo Tokyo Boston
    Chicago Denver Seattle Toronto Sydney Lima Delhi Seoul Geneva Milan Naples Munich Hamburg Lyon Porto
    Krakow Bergen Dallas Phoenix Houston Miami Atlanta Montreal Havana"""
)
ANIMALS = _split(
    """cat dog parrot rabbit horse turtle hamster goat canary ferret pony goose lizard snake donkey pig
    sheep owl"""
)
COLORS = _split(
    """red blue green yellow black white grey brown violet purple golden silver pink spotted striped"""
)
JOBS = _split(
    """baker teacher doctor lawyer painter plumber sailor farmer pilot chef nurse tailor driver writer
    singer dentist gardener carpenter butcher librarian waiter miner banker judge actor barber fisherman
    engineer"""
)
FOODS = _split(
    """pasta cheese bread apples pancakes soup rice noodles oysters salad plums cherries chocolate honey
    mushrooms beans potatoes waffles olives peaches lentils salmon trout pizza dumplings cookies carrots
    almonds"""
)
TASTES = _split("sweet sour salty spicy fresh frozen roasted boiled fried smoked creamy bitter")
PLACES = _split(
    """drawer cupboard box basket jar closet garage attic cellar shed locker cabinet suitcase backpack desk
    vase barrel chest wardrobe teapot"""
)
SHAPES = _split(
    """small large wooden metal tall new broken dusty hidden round square heavy painted locked deep lower"""
)
OBJECTS = _split(
    """lamp chair carpet candle mirror bottle hammer ladder bucket rope clock piano guitar letter map book
    coat hat umbrella shovel kettle pillow blanket picture newspaper bicycle wagon boat tent lantern"""
)
SITES = _split(
    """market station harbor garden church bridge river forest library museum kitchen bakery theater school
    hospital village meadow castle hotel tavern beach farm mill"""
)
MOODS = _split("quiet busy bright dark cold warm gloomy crowded narrow wide lonely modern lovely")
VERBS = _split("carried bought sold found lost cleaned repaired borrowed dropped opened moved admired")
PEOPLE = _split(
    "visitor stranger pirate hunter juggler merchant soldier student traveler guard musician clerk tourist"
)
MANNERS = _split("slowly quickly quietly carefully happily sadly suddenly finally")
WEATHER = _split("rain snow wind fog sun frost hail thunder")
TIMES = (
    "In the morning", "In the evening", "Last night", "On Monday", "On Friday", "After lunch", "Before dawn",
    "Every summer", "In the winter", "At noon", "On Sunday", "During the storm", "Later that day",
)  # fmt: skip
ROLL_WORDS = OBJECTS + PLACES + FOODS + ANIMALS + SITES + JOBS + COLORS + WEATHER
