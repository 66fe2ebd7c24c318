"""The words that prompts are composed of. None of them comes from a benchmark."""

TOPICS = """
volcanoes|the water cycle|honey bees|old lighthouses|electric cars|solar panels|chess openings|
bread baking|the Roman roads|medieval castles|public libraries|city trams|coral reefs|migrating birds|
sourdough|tea ceremonies|marathon training|sleep and health|vitamins|the human heart|vaccines|
antibiotics|photosynthesis|black holes|the Moon|Mars missions|weather satellites|tides|earthquakes|
glaciers|rain forests|deserts|wind turbines|nuclear fusion|batteries|semiconductors|databases|
computer networks|encryption|sorting algorithms|recursion|unit tests|web browsers|search engines|
machine translation|neural networks|robots in factories|3D printing|bridges|skyscrapers|canals|railways|
bicycles|sailing boats|airships|maps|compasses|clocks|the printing press|newspapers|radio plays|
silent films|jazz|string quartets|folk songs|watercolours|pottery|knitting|gardening|compost|
apple trees|vineyards|coffee|chocolate|cheese|spices|street markets|small businesses|interest rates|
inflation|insurance|taxes|savings|job interviews|remote work|team meetings|time management|
public speaking|negotiation|friendship|family dinners|raising a puppy|house cats|horses|wolves|whales|
octopuses|ants|butterflies|mushrooms|oak trees|soil|rivers|mountain huts|camping|fishing|skiing|
football|table tennis|swimming lessons|yoga|stress|kindness|honesty|courage|democracy|constitutions|
trade unions|the Silk Road|the Renaissance|the Industrial Revolution|ancient Egypt|Greek myths|
fairy tales|detective stories|science fiction|poetry|letters|diaries|museums|school uniforms|homework|
languages|dictionaries|sign language|music lessons|hospitals|nurses|firefighters|bakers|carpenters|
pilots|astronauts|teachers|farmers|a lost umbrella|a night train|an old map|a broken clock|
a garden party|a new neighbour|a rainy Sunday|a birthday cake|a paper boat|a quiet harbour
""".replace("\n", "").split("|")
PLACES = """
Lisbon|Nairobi|Kyoto|Oslo|Lima|Cairo|Hanoi|Quebec|Vienna|Dublin|Jakarta|Accra|Prague|Seoul|Quito|
Tunis
""".replace("\n", "").split("|")
NAMES = """
Amara|Bjorn|Chidi|Dalia|Elif|Farid|Greta|Hugo|Ines|Jonas|Keiko|Luca|Mina|Noor|Otto|Priya|Rosa|
Sven
""".replace("\n", "").split("|")
ROLES = """
a patient teacher|a ship's captain|a museum guide|a travel agent|a doctor|a detective|a poet|a gardener|
a chef|a judge|a sports reporter|a librarian|a software engineer|a historian|a wise grandmother|a robot
""".replace("\n", "").split("|")
LANGUAGES = """
French|German|Spanish|Italian|Portuguese|Dutch
""".replace("\n", "").split("|")
PROGRAMS = """
reverses a string|checks whether a number is prime|counts the words in a text|merges two sorted lists|
finds the largest number in a list|computes the factorial of a number|removes duplicates from a list|
checks whether a word is a palindrome|converts Celsius to Fahrenheit|computes Fibonacci numbers|
finds the longest common prefix of some words|sorts a list of dictionaries by a key|
reads a CSV file and sums a column|validates an e-mail address|rotates a matrix|implements a stack|
implements binary search|counts vowels|groups words by their first letter|parses a date|
simulates a dice roll|computes the greatest common divisor|flattens a nested list|generates a random password
""".replace("\n", "").split("|")
GOODS = """
apples|pencils|tickets|books|eggs|candles|marbles|stamps|bottles|chairs|oranges|postcards|tiles|
ropes
""".replace("\n", "").split("|")
