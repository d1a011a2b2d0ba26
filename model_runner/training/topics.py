"""What the training prompts are about. Nothing of this is in held_out.py."""

SUBJECTS = (
    *("photosynthesis", "gravity", "black holes", "plate tectonics", "the water cycle", "vaccines", "DNA", "magnets"),
    *("the French Revolution", "the Roman Empire", "the Silk Road", "the Renaissance", "the Cold War", "feudalism"),
    *("inflation", "supply and demand", "compound interest", "the stock market", "taxes", "budgeting", "insurance"),
    *("machine learning", "neural networks", "blockchain", "cloud computing", "encryption", "databases", "compilers"),
    *("operating systems", "the internet", "web browsers", "version control", "unit testing", "APIs", "recursion"),
    *("healthy eating", "sleep", "meditation", "stretching", "running a marathon", "vitamins", "stress at work"),
    *("gardening", "composting", "baking bread", "brewing coffee", "photography", "playing the guitar", "chess"),
    *("painting with watercolours", "learning a language", "public speaking", "job interviews", "time management"),
    *("solar panels", "wind power", "electric cars", "recycling", "deforestation", "coral reefs", "bees"),
    *("whales", "wolves", "octopuses", "penguins", "dinosaurs", "migration of birds", "spiders", "ants"),
    *("Mars", "the Moon", "comets", "satellites", "rockets", "telescopes", "time zones", "calendars"),
    *("probability", "prime numbers", "the Pythagorean theorem", "fractions", "statistics", "graph theory"),
    *("Shakespeare", "jazz", "impressionism", "Greek mythology", "fairy tales", "the novel", "opera", "cinema"),
    *("democracy", "human rights", "the United Nations", "free speech", "immigration", "urban planning"),
    *("airplanes", "bridges", "batteries", "3D printing", "robots", "refrigerators", "bicycles", "clocks"),
    *("the heart", "the brain", "the immune system", "muscles", "allergies", "eyesight", "digestion"),
    *("remote work", "teamwork", "leadership", "negotiation", "marketing", "customer service", "startups"),
    *("travelling alone", "camping", "packing a suitcase", "road trips", "hotels", "learning to swim", "yoga"),
)

CHARACTERS = (
    *("a retired sailor", "a young inventor", "a shy librarian", "a talking cat", "a lost astronaut", "a baker"),
    *("two brothers", "a grumpy wizard", "a street musician", "a robot gardener", "a queen in exile", "a detective"),
    *("a fox and a crow", "a night nurse", "a boy who cannot lie", "an old clockmaker", "a dragon afraid of fire"),
)
PLACES = (
    *("in a lighthouse", "on a night train", "in a small mountain village", "on a distant planet", "in an old library"),
    *("at a busy market", "under the sea", "in a city without electricity", "in a snowed-in hotel", "at a funfair"),
    *("in a haunted theatre", "on a desert island", "in a laboratory", "at the edge of a forest"),
)
EVENTS = (
    *("finds a map", "loses the only key", "meets an old friend", "discovers a hidden door", "must keep a secret"),
    *("receives a strange letter", "learns to forgive", "wins a contest", "saves a stranger", "builds a machine"),
    *("hears a voice at night", "misses the last train", "changes the future", "tells the truth at last"),
)
FORMS = ("short story", "poem", "dialogue", "diary entry", "fable", "song", "letter", "scene for a play", "limerick")

CODE_TASKS = (
    *("reverses a string", "checks whether a number is prime", "computes the factorial of a number"),
    *("sorts a list of numbers with bubble sort", "finds the largest element of a list", "counts words in a file"),
    *("removes duplicates from a list", "merges two sorted lists", "computes the Fibonacci numbers"),
    *("checks whether a word is a palindrome", "reads a CSV file and prints the average of a column"),
    *("downloads a web page", "flattens a nested list", "converts Celsius to Fahrenheit", "implements a stack"),
    *("implements binary search", "counts the vowels in a text", "finds the longest word in a sentence"),
    *("rotates a matrix", "computes the greatest common divisor", "validates an email address"),
    *("generates a random password", "implements a linked list", "groups words by their first letter"),
    *("computes the sum of the digits of a number", "parses a date", "prints a multiplication table"),
    *("implements a queue with two stacks", "finds two numbers that add up to a target", "writes a log file"),
)
LANGUAGES = ("Python", "JavaScript", "Java", "C", "C++", "Go", "Rust", "SQL", "Bash", "TypeScript")

SENTENCES = (
    "The train to the coast leaves at seven in the morning, so we should be at the station by half past six.",
    "She has worked in the same small hospital for twenty years and knows almost everyone in the town.",
    "If it rains tomorrow, the concert will be moved from the park to the old town hall.",
    "He could not find his glasses anywhere, although they had been on his nose the whole time.",
    "Our company plans to open three new offices next year and to hire about two hundred people.",
    "The children were too excited to sleep because their grandparents would arrive the next day.",
    "Please send me the report before Friday, and let me know if you need more time.",
    "The museum is closed on Mondays, but the garden behind it is open every day.",
    "I would like to book a table for four people at eight o'clock this evening.",
    "Although the film was very long, nobody in the audience left before the end.",
    "The new phone has a better camera, a brighter screen and a battery that lasts two days.",
    "My sister is learning to play the violin, and our neighbours are not happy about it.",
    "We walked along the river until it got dark and then took the bus back home.",
    "The teacher explained the problem twice, but most of the students still had questions.",
    "Fresh bread, tomatoes and a little olive oil are all you need for a good lunch.",
    "Last winter was so cold that the lake froze and people could walk across it.",
    "The meeting has been moved to Thursday because two of the managers are ill.",
    "Nobody knows who built the stone circle or what it was used for.",
    "The car broke down in the middle of nowhere, and there was no signal to call for help.",
    "Prices have gone up again, so many families have to think twice before they buy anything.",
)
TONGUES = ("French", "Spanish", "German", "Italian", "Portuguese", "simple English")
REWRITES = (
    *("Rewrite this sentence more formally", "Make this sentence shorter", "Correct this text and explain the changes"),
    *("Turn this into a friendly message", "Say the same in three other ways", "What does this sentence imply"),
    *("Write a short paragraph that begins with this sentence", "Classify the mood of this sentence and say why"),
)

LIST_TOPICS = (
    *("healthy breakfasts", "gifts for a teacher", "rainy-day activities", "books for teenagers", "indoor plants"),
    *("ways to save money", "tips for a first date", "names for a puppy", "questions for a job interview"),
    *("things to see in Paris", "ideas for a birthday party", "exercises without equipment", "hobbies for winter"),
    *("famous scientists", "vegetables that are easy to grow", "uses of baking soda", "mistakes in public speaking"),
    *("habits of good students", "ice-breaker questions", "ways to use less plastic", "causes of the First World War"),
)
OBJECTS = (
    *("apples", "books", "marbles", "tickets", "boxes", "stamps", "pencils", "oranges", "coins", "bottles", "chairs"),
)
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jamal", "Kim", "Leo")

GREETINGS = (
    *("Hello! How are you today?", "Hi, who are you?", "Good morning! What can you do?", "Tell me a joke."),
    *("I feel a bit sad today.", "I can't decide what to cook tonight.", "What is your favourite season, and why?"),
    *("I have an exam tomorrow and I'm nervous.", "Can you help me with my homework?", "I'm bored. Any ideas?"),
    *("My boss is unfair to me. What should I do?", "Should I get a cat or a dog?", "How do I make new friends?"),
    *("I want to change my career. Where do I start?", "Tell me something that I don't know.", "What is love?"),
)

DOCUMENTED = (
    *("argparse", "ast", "asyncio", "base64", "bisect", "calendar", "cmath", "code", "codecs", "collections"),
    *("configparser", "contextlib", "copy", "csv", "ctypes", "datetime", "decimal", "difflib", "doctest", "email"),
    *("enum", "fractions", "ftplib", "functools", "glob", "gzip", "heapq", "html", "http", "imaplib", "inspect"),
    *("io", "itertools", "json", "locale", "logging", "mailbox", "math", "mimetypes", "multiprocessing", "optparse"),
    *("os", "pathlib", "pdb", "pickle", "pkgutil", "platform", "plistlib", "pprint", "profile", "queue", "random"),
    *("re", "sched", "secrets", "shelve", "shlex", "shutil", "signal", "smtplib", "socket", "sqlite3", "ssl"),
    *("statistics", "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit"),
    *("tokenize", "traceback", "types", "unittest", "urllib", "uuid", "warnings", "weakref"),
    *("xml", "zipfile"),
)
"""Modules of Python's standard library whose docstrings are summarised, explained and continued."""
