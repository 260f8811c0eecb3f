"""The little world that the embedded model knows, written by a grammar.

Everything is generated from the word lists and templates in this file, so the text has no author
but this file, and anyone can make it again: ``python tales.py 60000 --seed 1 > tales.txt`` writes
60000 documents with a blank line after each. The language is small on purpose. A model of three
million parameters learns it in minutes, and what it then writes is readable, slightly silly, and
useful for an inference engine: stories to stream, sums and counting with one right answer,
lists, JSON, and an echo game.
"""

# ruff: noqa: E501

import argparse
import json
import random
from collections.abc import Iterator

ANIMALS = (
    "fox owl hedgehog otter badger goose mole heron toad squirrel bear snail goat mouse rabbit cat "
    "crow duck beaver lizard"
).split()
NAMES = (
    "Pip Juno Bram Odette Milo Tilly Oskar Nell Fergus Wren Basil Clover Hugo Maple Otto Poppy "
    "Rufus Sage Tobias Willow Ivo Hazel"
).split()
OPPOSITES = {
    "brave": "shy",
    "curious": "sleepy",
    "grumpy": "cheerful",
    "tiny": "enormous",
    "clever": "forgetful",
    "patient": "hasty",
    "polite": "noisy",
    "tidy": "messy",
}
OPPOSITES |= {v: k for k, v in OPPOSITES.items()}
# each place has one thing in it where lost belongings turn up
PLACES = {
    "the old mill": "wheel",
    "the lighthouse": "lamp",
    "the quiet library": "ladder",
    "the mossy bridge": "rail",
    "the pumpkin field": "scarecrow",
    "the night market": "bell",
    "the stone harbour": "rope",
    "the apple orchard": "gate",
    "the windy hill": "kite",
    "the bakery": "oven",
}
ITEMS = (
    "red lantern,brass key,blue teapot,wooden spoon,silver whistle,paper map,woollen scarf,"
    "tin drum,glass marble,yellow umbrella,cracked compass,jar of honey"
).split(",")
WEATHER = (
    "It was raining sideways",
    "The fog was thick as soup",
    "The moon was round and pale",
    "Snow had fallen in the night",
    "The sun was warm on the roofs",
    "A warm wind came from the south",
    "Thunder was grumbling far away",
    "The stars were very bright",
)
COLOURS = "red blue green yellow white black grey brown".split()
FOODS = "plum cake,onion soup,warm bread,cheese pie,pear jam,mint tea,oat biscuits,roast chestnuts".split(",")
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()


def a(word: str) -> str:
    "`word` with its indefinite article."
    return ("an " if word[0] in "aeiou" else "a ") + word


class Cast:
    "Who and what one tale is about. The choices stay the same from its first sentence to its last."

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.name, self.friend = rng.sample(NAMES, 2)
        self.animal, self.other = rng.sample(ANIMALS, 2)
        self.trait = rng.choice(list(OPPOSITES))
        self.place = rng.choice(list(PLACES))
        self.thing = PLACES[self.place]
        self.item, self.food = rng.choice(ITEMS), rng.choice(FOODS)
        self.he, self.his = rng.choice([("he", "his"), ("she", "her")])
        self.count = NUMBERS[rng.randint(2, 9)]


def opening(c: Cast) -> str:
    return c.rng.choice(
        [
            f"Once there was {a(c.trait)} {c.animal} called {c.name} who lived by {c.place}.",
            f"By {c.place} lived {a(c.animal)} named {c.name}, and a more {c.trait} {c.animal} was never seen.",
            f"{c.name} the {c.animal} was the most {c.trait} {c.animal} of all, and lived by {c.place}.",
        ]
    )


def lost_and_found(c: Cast) -> list[str]:
    "Something dear goes missing, a friend comes by, and it was near all along."
    say, he = c.rng.choice, c.he.capitalize()
    return [
        say(
            [
                f"{he} owned one precious thing, a {c.item}, and never went out without it.",
                f"Of all {c.his} things, {c.he} loved {c.his} {c.item} best.",
                f"Every evening {c.he} polished {c.his} {c.item} and ate {c.food}.",
            ]
        ),
        say(
            [
                f"{say(WEATHER)} when the {c.item} went missing.",
                f"{say(WEATHER)}, and that was the morning the {c.item} was gone.",
            ]
        ),
        say(
            [
                f'"Where is my {c.item}?" cried {c.name}. {he} looked under the {c.thing}, behind the {c.thing}, and even inside {c.his} own hat.',
                f"{c.name} looked under the bed, in the kettle, and all around the {c.thing}, but there was no {c.item}.",
                f'{c.name} sat down by the {c.thing} and said, "I will not eat until I find my {c.item}." Then {c.he} ate some {c.food}, only to think better.',
            ]
        ),
        meeting(c),
        say(
            [
                f'"Why so sad, {c.name}?" asked {c.friend}. "I have lost my {c.item}," said {c.name}.',
                f'"You look {OPPOSITES[c.trait]} today," said {c.friend}. "I have lost my {c.item}," said {c.name}.',
                f'"Have you seen a {c.item}?" asked {c.name}. "I have seen many things," said {c.friend}, "but let us look together."',
            ]
        ),
        say(
            [
                f"They walked {c.count} miles and asked {c.count} {say(COLOURS)} beetles, and not one of them knew.",
                f"They searched {c.place} from top to bottom, which took {c.count} hours.",
                f"They made a plan with {c.count} steps, and forgot all of them but the last.",
            ]
        ),
        say(
            [
                f'At last {c.friend} laughed. "It is hanging on the {c.thing}!" And so it was.',
                f'Then {c.friend} pointed. "Is that not your {c.item}, there beside the {c.thing}?" It was.',
                f"And there, next to the {c.thing}, lay the {c.item}, quite dry and not at all sorry.",
            ]
        ),
    ]


def race(c: Cast) -> list[str]:
    "Two friends race for something good to eat, and neither wins."
    say = c.rng.choice
    return [
        meeting(c),
        f'"I can run to the {c.thing} faster than you," said {c.friend}. "We shall see," said {c.name}.',
        say(
            [
                f"So they agreed on a race, and the prize was {c.food}.",
                f"So they agreed on a race, {c.count} times around the {c.thing}.",
            ]
        ),
        f"{say(WEATHER)} when they began.",
        say(
            [
                f"{c.friend} fell asleep halfway, and {c.name} stopped to wait, to be polite.",
                f"{c.name} ran the wrong way, and {c.friend} followed, to be sure.",
                f"After {c.count} steps they were both too hungry to run.",
            ]
        ),
        f"Nobody won. \"It was a very {c.trait} race,\" said {c.friend}.",
    ]


def meeting(c: Cast) -> str:
    return c.rng.choice(
        [
            f"Then along came {c.friend} the {c.other}.",
            f"Just then {c.friend} the {c.other} knocked at the door.",
            f"On the road {c.he} met {c.friend} the {c.other}, who was carrying {c.food}.",
        ]
    )


def ending(c: Cast) -> str:
    return c.rng.choice(
        [
            f'"Thank you," said {c.name}, and they shared the {c.food} until it was dark.',
            f"{c.name} gave {c.friend} half of the {c.food}, and from that day they were friends.",
            f"That night the two of them ate {c.food} by {c.place}, and nobody was {OPPOSITES[c.trait]}.",
        ]
    )


def moral(c: Cast, lost: bool) -> str:
    about = (
        ["So it is better to look with a friend than to look alone.",
         f"And that is why every {c.animal} ties a string to its {c.item.split()[-1]}."]
        if lost
        else ["So it is better to run with a friend than to run alone."]
    )  # fmt: skip
    return c.rng.choice([*about, "The end.", f"If you go to {c.place}, you may still hear them laughing."])


def tale(c: Cast, lost: bool) -> str:
    plot = lost_and_found(c) if lost else race(c)
    return " ".join([opening(c), *plot, ending(c), moral(c, lost)])


def exchange(rng: random.Random) -> tuple[str, str]:
    "One question and its answer."
    kind, c = rng.randrange(10), Cast(rng)
    if kind <= 4:
        lost = rng.random() < 0.75
        ask = [
            f"Tell me a story about {a(c.animal)}.",
            f"Tell me a story about {a(c.animal)} called {c.name}.",
            f"Tell me a story about {a(c.trait)} {c.animal} called {c.name}.",
            f"Write a story about {a(c.animal)} that happens at {c.place}.",
        ]
        if lost:
            ask.append(f"Tell me a tale of {c.name} the {c.animal} and the {c.item}.")
        else:
            ask.append(f"Tell me how {c.name} the {c.animal} ran a race.")
        return rng.choice(ask), tale(c, lost)
    if kind == 5:
        x, y = rng.randint(0, 10), rng.randint(0, 10)
        return (
            f"What is {NUMBERS[x]} plus {NUMBERS[y]}?",
            f"{NUMBERS[x].capitalize()} plus {NUMBERS[y]} is {NUMBERS[x + y]}.",
        )
    if kind == 6:
        x = rng.randint(0, 12)
        y = rng.randint(x + 2, 20)
        return f"Count from {NUMBERS[x]} to {NUMBERS[y]}.", ", ".join(NUMBERS[x : y + 1]) + "."
    if kind == 7:
        age = rng.randint(1, 20)
        who = {"name": c.name, "animal": c.animal, "trait": c.trait, "age": age}
        return f"Write JSON for {c.name}, {a(c.trait)} {c.animal}, {NUMBERS[age]} years old.", json.dumps(who)
    if kind == 8:
        words = rng.sample([c.animal, c.other, *COLOURS, *NUMBERS[1:10]], rng.randint(3, 5))
        return f"Repeat after me: {' '.join(words)}.", " ".join(words) + "."
    if rng.random() < 0.5:
        return f"What is the opposite of {c.trait}?", f"The opposite of {c.trait} is {OPPOSITES[c.trait]}."
    group, members = rng.choice([("animals", ANIMALS), ("colours", COLOURS), ("foods", FOODS), ("things", ITEMS)])
    n = rng.randint(2, 5)
    return f"Name {NUMBERS[n]} {group}.", ", ".join(rng.sample(list(members), n)) + "."


SYSTEM = "You are a teller of small tales."


def chat(rng: random.Random) -> str:
    "One to three exchanges in the chat format of the tokenizer's template."
    text = f"<|system|>\n{SYSTEM}<|end|>\n" if rng.random() < 0.4 else ""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        ask, answer = exchange(rng)
        text += f"<|user|>\n{ask}<|end|>\n<|assistant|>\n{answer}<|end|>\n"
    return text.rstrip("\n")


def documents(count: int, seed: int) -> Iterator[str]:
    "`count` documents: two in five are bare tales, the rest are chats."
    rng = random.Random(seed)
    for _ in range(count):
        yield tale(Cast(rng), rng.random() < 0.75) if rng.random() < 0.4 else chat(rng)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for text in documents(args.count, args.seed):
        print(text + "\n")
