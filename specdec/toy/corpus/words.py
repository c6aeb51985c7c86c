"""Word lists shared by all families. Knows nothing about templates or tasks."""

from __future__ import annotations


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", " ").split(","))


_LISTS = {
    "person": _split(
        "Anna Ben Clara David Emma Felix Grace Hugo Iris Jonas Kara Leo Mia Noah Olga Paul Rosa Sam Tina Victor "
        "Wendy Zoe Adam Bella Carl Dora Elias Fiona Gavin Helen Ivan Julia Kevin Laura Marco Nina Oscar Petra Ruth "
        "Simon Tara Ugo Vera Walter Yara Abel Daisy Ella Frank Gina Henry Ida Jack Lena Max Nora Omar Pia Rita Tom"
    ),
    "surname": _split(
        "Abbot Baker Carver Dalton Ellis Fischer Grant Harper Irwin Jensen Keller Lambert Moreno Novak Olsen Porter "
        "Quinn Reyes Shaw Turner Vance Weber York Archer Bishop Chandler Doyle Foster Garner Hale Kerr Lowell Mercer "
        "Norris Osborn Pike Rowan Sutton Thorne Walsh"
    ),
    "town": _split(
        "Alder Brook Corvale Dunmore Eastford Fairhaven Greystone Halden Ironbridge Juniper Kelton Larkwood Marlow "
        "Northam Oakley Penrose Quarry Redhill Silverton Thornby Upton Valley Westbay Yarrow Ashford Birchwood Clayton "
        "Deepwell Elmswood Foxton Glenrock Harrow Kingsley Linden Milbrook Newport Orchard Pinecrest Rockport Stonewell"
    ),
    "animal": _split(
        "fox owl rabbit bear wolf mouse hedgehog crow otter badger deer frog goose heron lizard mole pony raven "
        "squirrel turtle cat dog horse goat sheep duck sparrow beetle hawk lynx"
    ),
    "food": _split(
        "bread soup cheese rice pasta honey apples plums beans carrots onions mushrooms pancakes salad stew cake pears "
        "potatoes tomatoes porridge noodles eggs fish biscuits berries lentils"
    ),
    "object": _split(
        "lamp key book coin map clock mirror basket rope bottle hat letter drum kite box knife candle ring shell stone "
        "bell whistle blanket ladder lantern compass notebook umbrella necklace violin"
    ),
    "plural": _split(
        "apples books coins pencils stickers marbles cards stamps shells buttons cookies eggs flowers balloons tickets "
        "bottles boxes stones candles pears oranges cups keys beads ribbons badges"
    ),
    "place": _split(
        "forest harbor market garden library bridge castle station valley river mountain bakery school museum village "
        "farm tower cave beach meadow square workshop mill island orchard lighthouse"
    ),
    "building": _split(
        "library bridge castle station bakery school museum mill tower workshop lighthouse theater chapel barn"
    ),
    "job": _split(
        "baker teacher doctor farmer sailor painter carpenter engineer nurse pilot gardener tailor writer miner cook "
        "singer driver lawyer plumber potter weaver librarian mechanic shepherd"
    ),
    "adj": _split(
        "old small bright quiet brave strange golden tired gentle proud clever lonely cheerful broken silver hidden "
        "warm heavy narrow wild dusty cold shy curious ancient green pale round sharp soft"
    ),
    "mood": _split(
        "happy worried angry calm excited nervous proud sad hopeful surprised grateful bored tired relieved"
    ),
    "color": _split("red blue green yellow black white orange purple brown grey silver golden pink"),
    "weekday": _split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "month": _split("January February March April May June July August September October November December"),
    "season": _split("spring summer autumn winter"),
    "adverb": _split(
        "slowly quickly quietly carefully gently suddenly happily bravely calmly eagerly softly proudly patiently "
        "secretly firmly kindly"
    ),
    "weather": _phrases(
        "heavy rain, bright sun, thick fog, strong wind, light snow, a cold mist, a warm breeze, a summer storm, "
        "grey clouds, a hard frost"
    ),
    "time_of_day": _phrases(
        "at dawn, at noon, in the evening, late at night, before breakfast, after lunch, at sunset"
    ),
    "hobby": _phrases(
        "painting, chess, gardening, hiking, baking, fishing, reading, swimming, cycling, pottery, knitting, singing, "
        "photography, dancing, climbing, drawing, sailing, astronomy"
    ),
    "event": _phrases(
        "wedding, concert, book fair, birthday party, team meeting, school play, picnic, charity run, workshop, "
        "farewell dinner, chess tournament, art show, job interview, science fair"
    ),
    "product": _phrases(
        "lamp, backpack, kettle, desk chair, bicycle, radio, coffee grinder, tent, raincoat, camera, blender, "
        "keyboard, suitcase, mattress, toaster, notebook, water bottle, garden hose, headphones set, wall clock"
    ),
    "quality": _phrases(
        "patience, courage, honesty, kindness, curiosity, humor, discipline, creativity, loyalty, modesty, optimism, "
        "fairness"
    ),
    "material": _split("wood stone glass iron copper clay paper leather wool silk bronze marble brick steel"),
    "sport": _split("football tennis rowing hockey volleyball handball cricket rugby basketball swimming"),
    "crop": _split("wheat barley corn rice grapes olives potatoes apples tea hops"),
    "title": _split("Dr. Mr. Mrs. Ms. Professor Captain Judge"),
    "feeling": _phrases(
        "the smell of {food}, the sound of bells, a distant song, a soft light, an old memory, the taste of salt"
    ),
}

LISTS: dict[str, tuple[str, ...]] = _LISTS
NUMBER_WORDS = _split("zero one two three four five six seven eight nine ten eleven twelve")
