"""Writes the pairs for the tutorial on pairs: an English sentence, and the same sentence in the passive voice.

    python examples/passive_pairs.py pairs.tsv --number 20000
    python examples/passive_pairs.py valid.tsv --number 500 --seed 1 --without pairs.tsv
    python examples/passive_pairs.py test.tsv --number 500 --seed 2 --without pairs.tsv

The rule is more than copying: subject and object swap places, the verb becomes a participle after a form of "to be"
that agrees with the object, pronouns change case, "did not" moves, and the time stays where it is.

    the old king did not see two red houses yesterday .     two red houses were not seen by the old king yesterday .
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

VERBS = [
    *("see saw seen", "take took taken", "write wrote written", "know knew known"),
    *("eat ate eaten", "steal stole stolen", "break broke broken", "choose chose chosen"),
    *("find found found", "sell sold sold", "teach taught taught", "buy bought bought"),
    *("catch caught caught", "make made made", "build built built", "lose lost lost"),
    *("draw drew drawn", "forget forgot forgotten", "hide hid hidden", "paint painted painted"),
    *("follow followed followed", "praise praised praised", "visit visited visited", "clean cleaned cleaned"),
    *("watch watched watched", "carry carried carried", "help helped helped", "push pushed pushed"),
    *("open opened opened", "admire admired admired"),
]
"""Present, past, participle."""
NOUNS = [
    *("king", "queen", "artist", "doctor", "farmer", "teacher", "soldier", "child", "dog", "cat"),
    *("horse", "bird", "house", "castle", "garden", "river", "tree", "letter", "book", "picture"),
    *("song", "boat", "car", "city", "village", "door", "window", "table", "stone", "flower"),
]
ADJECTIVES = [
    *("old", "young", "red", "white", "small", "great", "quiet", "famous", "happy", "tired", "dark", "golden"),
]
TIMES = ["", "", "yesterday", "today", "again", "last year", "in winter", "after the war", "every morning"]
PRONOUNS = {"he": "him", "she": "her", "they": "them", "we": "us", "i": "me"}


def phrase(chance: random.Random) -> tuple[str, bool]:
    """A noun phrase, and whether it is plural."""
    noun, adjective = chance.choice(NOUNS), chance.choice([*ADJECTIVES, "", "", "", ""])
    determiner = chance.choice(["the", "the", "a", "my", "her", "two", "many"])
    is_plural = determiner in ("two", "many")
    nouns = {"child": "children", "city": "cities"}.get(noun, f"{noun}s") if is_plural else noun
    words = [determiner, adjective, nouns]
    if determiner == "a" and (adjective or nouns)[0] in "aeiou":
        words[0] = "an"
    return " ".join(word for word in words if word), is_plural


def pair(chance: random.Random) -> tuple[str, str]:
    """An active sentence and its passive."""
    subject, is_many = phrase(chance)
    agent = subject
    if chance.random() < 0.25:
        subject = chance.choice(list(PRONOUNS))
        agent, is_many = PRONOUNS[subject], subject != "he" and subject != "she"
    patient, is_plural = phrase(chance)
    present, past, participle = chance.choice(VERBS).split()
    form = chance.choice(["past", "past", "present", "future", "not"])
    third = present + ("es" if present.endswith(("ch", "sh")) else "s") if present != "carry" else "carries"
    verb = {
        "past": past,
        "present": present if is_many else third,
        "future": f"will {present}",
        "not": f"did not {present}",
    }[form]
    be = {
        "past": "were" if is_plural else "was",
        "present": "are" if is_plural else "is",
        "future": "will be",
        "not": "were not" if is_plural else "was not",
    }[form]
    time = chance.choice(TIMES)
    ends = [word for word in (time, ".") if word]
    return " ".join([subject, verb, patient, *ends]), " ".join([patient, be, participle, "by", agent, *ends])


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description="Writes pairs: a sentence, and the same in the passive voice.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--number", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", type=Path, help="a file whose sources are left out")
    given = parser.parse_args()
    chance, found = random.Random(given.seed), dict[str, str]()
    others = [] if given.without is None else given.without.read_text(encoding="utf-8").splitlines()
    left_out = {line.split("\t")[0] for line in others}
    while len(found) < given.number:
        source, target = pair(chance)
        if source not in left_out:
            found[source] = target
    given.file.write_text("".join(f"{source}\t{target}\n" for source, target in found.items()), encoding="utf-8")
    print(f"{len(found)} pairs in {given.file}")


if __name__ == "__main__":
    main()
