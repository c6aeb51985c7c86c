"""True one-line facts about everyday subjects, for explanations (Alpaca, MT-Bench's STEM and humanities).

Knows nothing about prompts. Each topic: its field and five facts, the first of which defines it.
"""

# ruff: noqa: E501  (one topic a row reads as a table)
from __future__ import annotations

TOPICS: dict[str, tuple[str, ...]] = {
    "photosynthesis": ("stem", "Photosynthesis is how plants make sugar from light.", "It needs water and carbon dioxide.", "It releases oxygen into the air.", "It happens in the green parts of a leaf.", "Almost all food chains begin with it."),
    "gravity": ("stem", "Gravity is the pull between things that have mass.", "It keeps the planets in their orbits.", "It grows weaker with distance.", "It gives weight to everything on Earth.", "The Moon's gravity causes the tides."),
    "evaporation": ("stem", "Evaporation is the change of a liquid into a gas.", "It happens at the surface of the liquid.", "Heat and wind make it faster.", "It cools the skin when we sweat.", "It is part of the water cycle."),
    "magnetism": ("stem", "Magnetism is a force between moving electric charges.", "Every magnet has two poles.", "Equal poles push each other away.", "Iron is pulled strongly by magnets.", "The Earth itself acts as a magnet."),
    "friction": ("stem", "Friction is the force that resists sliding.", "Rough surfaces cause more of it.", "It turns motion into heat.", "Brakes could not work without it.", "Oil makes it smaller."),
    "the heart": ("stem", "The heart is a muscle that pumps blood.", "It has four chambers.", "It beats about seventy times a minute at rest.", "The blood brings oxygen to the body.", "Exercise makes it stronger."),
    "vaccines": ("stem", "A vaccine trains the body to fight a disease.", "It shows the immune system a harmless part of a germ.", "The body then makes antibodies.", "Later it can react much faster.", "Vaccines ended smallpox."),
    "electricity": ("stem", "Electricity is the flow of electric charge.", "Metals carry it well.", "Batteries push charge through a circuit.", "Power stations make it from motion.", "It can turn into light, heat or movement."),
    "rainbows": ("stem", "A rainbow is sunlight split into colors by drops of water.", "Each drop bends the light.", "Red is on the outside and violet inside.", "The sun must stand behind the viewer.", "Nobody can reach the end of one."),
    "bees": ("stem", "Bees are insects that carry pollen from flower to flower.", "Many crops depend on them.", "They make honey from nectar.", "A hive has one queen.", "They show each other the way by dancing."),
    "volcanoes": ("stem", "A volcano is an opening where melted rock leaves the Earth.", "The melted rock is called lava once it is outside.", "Ash from volcanoes makes soil rich.", "Most volcanoes lie where plates meet.", "Some have been quiet for centuries."),
    "sleep": ("stem", "Sleep is a time of rest for body and brain.", "The brain sorts memories during sleep.", "Adults need seven to nine hours.", "Bright light makes it harder to fall asleep.", "Too little sleep makes us slow and tired."),
    "computers": ("stem", "A computer is a machine that follows instructions.", "Its processor does the arithmetic.", "Its memory holds data and programs.", "Everything inside is stored as zeros and ones.", "Software tells it what to do."),
    "atoms": ("stem", "An atom is the smallest piece of an element.", "Its center is called the nucleus.", "Electrons surround the nucleus.", "Atoms join to form molecules.", "Most of an atom is empty space."),
    "recycling": ("stem", "Recycling turns waste into new material.", "Glass and metal can be recycled many times.", "It saves energy.", "It keeps waste out of rivers and seas.", "Sorting the waste well is important."),
    "democracy": ("humanities", "Democracy is rule by the people.", "Citizens choose their leaders by voting.", "Courts and laws limit the leaders.", "A free press keeps voters informed.", "Its name comes from Greek."),
    "the printing press": ("humanities", "The printing press made many copies of a text quickly.", "Gutenberg built one in Europe around 1450.", "Books became much cheaper.", "More people learned to read.", "New ideas spread faster."),
    "inflation": ("humanities", "Inflation means that prices rise over time.", "Money then buys less than before.", "It can come from high demand.", "Central banks fight it with higher interest rates.", "A little inflation is normal."),
    "supply and demand": ("humanities", "Supply and demand decide the price of a good.", "High demand pushes the price up.", "High supply pushes the price down.", "Sellers offer more when prices are high.", "Buyers take less when prices are high."),
    "the Renaissance": ("humanities", "The Renaissance was a time of new art and learning in Europe.", "It began in Italy.", "Artists studied the human body and perspective.", "Scholars read Greek and Roman texts again.", "Rich families paid for many works."),
    "the Roman Empire": ("humanities", "The Roman Empire ruled the lands around the Mediterranean Sea.", "Its roads linked distant cities.", "Latin was its language of law.", "Augustus was its first emperor.", "Its western half fell in 476."),
    "the Silk Road": ("humanities", "The Silk Road was a network of trade routes through Asia.", "Merchants carried silk, spices and glass.", "Ideas and religions traveled with them.", "Towns along the way grew rich.", "Sea routes later replaced it."),
    "poetry": ("humanities", "Poetry is language shaped by sound and rhythm.", "Poems often use images.", "Rhyme is common but not needed.", "Old poems were sung or spoken from memory.", "A sonnet has fourteen lines."),
    "money": ("humanities", "Money is anything people accept as payment.", "It makes trade easier than barter.", "The first coins were made of metal.", "Today most money exists only as numbers.", "It also lets people save."),
    "museums": ("humanities", "A museum keeps and shows objects of value.", "Experts protect the objects from damage.", "Visitors can learn about art, history or science.", "Many museums grew from private collections.", "Only a part of what they own is on show."),
    "the Industrial Revolution": ("humanities", "The Industrial Revolution moved work from homes to factories.", "It began in Britain in the eighteenth century.", "Steam engines drove the machines.", "Many people moved to cities.", "It brought wealth, but also smoke and long hours."),
    "philosophy": ("humanities", "Philosophy asks basic questions about life and knowledge.", "Its name means love of wisdom.", "Socrates taught by asking questions.", "Logic is one of its tools.", "Many sciences grew out of it."),
    "maps": ("humanities", "A map is a drawing of a place from above.", "Its scale tells how distances shrink.", "Symbols stand for roads, rivers and towns.", "No flat map can show the round Earth without error.", "Sailors needed good maps to cross the sea."),
}

# (goal, ordered steps): the order matters, so how-to answers are learnable but not trivially short.
STEPS: dict[str, tuple[str, ...]] = {
    "make tea": ("Boil fresh water.", "Put a tea bag into a cup.", "Pour the hot water over it.", "Wait three minutes.", "Remove the bag.", "Add milk or sugar if you like."),
    "plant a tree": ("Choose a sunny place.", "Dig a wide hole.", "Loosen the roots.", "Set the tree upright.", "Fill the hole with soil.", "Water it well."),
    "bake bread": ("Mix flour, water, salt and yeast.", "Knead the dough.", "Let it rise for an hour.", "Shape a loaf.", "Bake it until it is golden.", "Let it cool before cutting."),
    "clean a window": ("Wipe off the dust.", "Mix warm water and soap.", "Wash the glass with a sponge.", "Pull the water down with a blade.", "Dry the edges with a cloth."),
    "write a letter": ("Put the date at the top.", "Greet the reader.", "Say why you are writing.", "Give the details.", "End with a polite line.", "Sign your name."),
    "fix a flat tire": ("Take the wheel off.", "Pull out the inner tube.", "Find the hole.", "Glue a patch on it.", "Put the tube back.", "Pump it up."),
    "paint a wall": ("Cover the floor.", "Fill small holes.", "Tape the edges.", "Roll on the first coat.", "Let it dry.", "Add a second coat."),
    "learn a song": ("Listen to it several times.", "Read the words.", "Learn one line at a time.", "Sing along slowly.", "Practice every day.", "Perform it for a friend."),
    "cook rice": ("Rinse the rice.", "Add two cups of water for each cup of rice.", "Bring it to a boil.", "Turn down the heat.", "Cover it for fifteen minutes.", "Let it rest."),
    "save money": ("Write down what you spend.", "Set a monthly goal.", "Cut one cost you do not need.", "Put money aside on payday.", "Check your progress each month."),
    "prepare for a test": ("Make a list of the topics.", "Plan an hour for each day.", "Read your notes.", "Solve old problems.", "Sleep well the night before."),
    "build a birdhouse": ("Saw the boards.", "Drill a round door.", "Nail the walls together.", "Add the roof.", "Paint it with safe paint.", "Hang it in a quiet tree."),
    "wash a dog": ("Brush the fur.", "Fill the tub with warm water.", "Wet the coat.", "Rub in the soap.", "Rinse it well.", "Dry the dog with a towel."),
    "pack a suitcase": ("Check the weather.", "Make a list.", "Roll your clothes.", "Put shoes at the bottom.", "Keep papers on top.", "Weigh the suitcase."),
    "grow tomatoes": ("Start the seeds indoors.", "Move the plants outside in late spring.", "Tie them to sticks.", "Water the soil, not the leaves.", "Pick the red ones."),
    "give a speech": ("Know your audience.", "Choose three main points.", "Write short notes.", "Practice aloud.", "Look at the listeners.", "End with a clear message."),
}
