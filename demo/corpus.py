"""Generated documents with facts to retrieve, and evaluation samples over them.

A document is paragraphs of one-sentence facts ("The code of Alice is 4821.") hidden among filler. A fact
reads the same in the document and in the answer, so every value can be checked by exact match. Everything
follows from an integer seed.

Tasks
    single     one fact, no other fact with the same attribute
    multikey   one fact among many with the same attribute and other facts of the same person
    twohop     an attribute of somebody's neighbor; the answer is the chain of both facts
    list       three to six attributes of one person, one sentence each
    followup   a second question about the same document, after a first answer
    recite     repeat a long roll of words: too many tokens to drop any
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import words as w

TASKS = ("single", "multikey", "twohop", "list", "followup", "recite")
ATTRIBUTES = ("code", "key", "pet", "job", "meal", "gift")
PRACTICE_ATTRIBUTES = ("boat", "school", "horse")
FACT_TOKENS = 10
MIN_PARAGRAPH = 4
RECITE_SHARE = 6
ROLL_MAX_WORDS = 160
RECITE_MAX_WORDS = 64


@dataclass(frozen=True)
class Fact:
    """One sentence; `values` are the indices of its words (split at spaces) that carry the value."""

    name: str
    attribute: str
    sentence: str
    values: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A question and the facts whose sentences, in order, are its answer."""

    task: str
    text: str
    facts: tuple[Fact, ...]

    @property
    def answer(self) -> str:
        return " ".join(f.sentence for f in self.facts)


@dataclass(frozen=True)
class Sample:
    """One evaluation item: chat messages up to the last user turn, and the exact expected answer."""

    task: str
    messages: list[dict[str, str]]
    answer: str
    context_tokens: int
    prompt_tokens: int
    evidence: tuple[str, ...]


@dataclass
class Document:
    """Sentences in reading order; `breaks` are the indices that begin a paragraph."""

    sentences: list[str] = field(default_factory=list)
    breaks: set[int] = field(default_factory=set)

    @property
    def text(self) -> str:
        parts = []
        for i, sentence in enumerate(self.sentences):
            parts.append(("" if i == 0 else "\n" if i in self.breaks else " ") + sentence)
        return "".join(parts)


def make_fact(rng: random.Random, name: str, attribute: str) -> Fact:
    """Draw a value for `attribute` of `name`; every value has two tokens."""
    c = rng.choice
    tail, values = {
        "code": lambda: (f"{rng.randrange(10000):04d}", (5,)),
        "key": lambda: (f"in the {c(w.SHAPES)} {c(w.PLACES)}", (7, 8)),
        "pet": lambda: (f"a {c(w.COLORS)} {c(w.ANIMALS)}", (6, 7)),
        "job": lambda: (f"{c(w.JOBS)} in {c(w.CITIES)}", (5, 7)),
        "meal": lambda: (f"{c(w.TASTES)} {c(w.FOODS)}", (5, 6)),
        "gift": lambda: (f"a {c(w.SHAPES)} {c(w.OBJECTS)}", (6, 7)),
        "boat": lambda: (f"{c(w.SHAPES)} and {c(w.COLORS)}", (5, 7)),
        "school": lambda: (f"in {c(w.CITIES)} near the {c(w.SITES)}", (6, 9)),
        "horse": lambda: (f"{c(w.COLORS)} and from {c(w.CITIES)}", (5, 8)),
    }[attribute]()
    return Fact(name, attribute, f"The {attribute} of {name} is {tail}.", values)


def neighbor_fact(name: str, neighbor: str) -> Fact:
    """The link of a two-hop question."""
    return Fact(name, "neighbor", f"The neighbor of {name} is {neighbor}.", (5,))


def roll_fact(rng: random.Random, n_words: int, pool: Sequence[str] = w.EVAL_NAMES + w.ROLL_WORDS) -> Fact:
    """A roll of `n_words` different words in random order, in one long sentence."""
    body = " ".join(rng.sample(pool, n_words))
    return Fact("", "roll", f"The roll is {body}.", tuple(range(3, 3 + n_words)))


FILLER = (
    "The {mood} {site} was full of {person}s and the {weather} lasted all day.",
    "{time} the {person} {verb} a {color} {object} near the {site}.",
    "The {person} walked {manner} from the {site} to the {mood} {site}.",
    "{time} {name} {verb} the {shape} {object} of the {person}.",
    "It was {mood} in {city} because of the {weather}.",
    "The {job} and the {person} talked about the {object} and the {animal}.",
    "{time} there was {weather} over the {site} and the {mood} {site}.",
    "The {shape} {object} cost {price} coins at the {site}.",
    "A {mood} {person} met {name} at the {site} and {verb} a {object}.",
    "The {color} {animal} slept under the {shape} {object}.",
    "The {person} {verb} {count} {object}s and some {food}.",
    "{name} and the {person} saw a {shape} {object} at the {site}.",
)
POOLS: dict[str, Sequence] = {
    "mood": w.MOODS,
    "site": w.SITES,
    "person": w.PEOPLE,
    "weather": w.WEATHER,
    "time": w.TIMES,
    "verb": w.VERBS,
    "color": w.COLORS,
    "object": w.OBJECTS,
    "manner": w.MANNERS,
    "shape": w.SHAPES,
    "city": w.CITIES,
    "job": w.JOBS,
    "animal": w.ANIMALS,
    "food": w.FOODS,
    "price": range(10, 10000),
    "count": range(2, 100),
}


def filler(rng: random.Random, names: Sequence[str]) -> str:
    """One sentence that answers no question."""

    def draw(match: re.Match) -> str:
        return str(rng.choice(names if match[1] == "name" else POOLS[match[1]]))

    return re.sub(r"\{(\w+)\}", draw, rng.choice(FILLER))


def join(items: Sequence[str]) -> str:
    """`a, b and c`."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def ask_one(fact: Fact, task: str = "single") -> Question:
    return Question(task, f"What is the {fact.attribute} of {fact.name}?", (fact,))


def ask_hop(link: Fact, fact: Fact) -> Question:
    return Question("twohop", f"What is the {fact.attribute} of the neighbor of {link.name}?", (link, fact))


def ask_list(facts: Sequence[Fact]) -> Question:
    return Question(
        "list", f"List the {join([f.attribute for f in facts])} of {facts[0].name}.", tuple(facts)
    )


def ask_roll(roll: Fact) -> Question:
    return Question("recite", "Repeat the roll.", (roll,))


def arrange(
    rng: random.Random, facts: Sequence[Fact], names: Sequence[str], room: int, length: Callable[[str], int]
) -> Document:
    """Shuffle the facts among filler until about `room` tokens are used; paragraphs of 4-8 sentences.

    `length(sentence)` counts tokens. Paragraphs begin with "The", so a word at a paragraph's start needs no
    token of its own.
    """
    sentences = [f.sentence for f in facts]
    newline = 1 / MIN_PARAGRAPH
    used = sum(length(s) + newline for s in sentences)
    while True:
        s = filler(rng, names)
        used += length(s) + newline
        if used > room:
            break
        sentences.append(s)
    rng.shuffle(sentences)
    first = next((i for i, s in enumerate(sentences) if s.startswith("The ")), 0)
    sentences[0], sentences[first] = sentences[first], sentences[0]
    doc, run, limit = Document(sentences), 0, rng.randint(MIN_PARAGRAPH, 8)
    for i, s in enumerate(sentences):
        if run >= limit and s.startswith("The "):
            doc.breaks.add(i)
            run, limit = 0, rng.randint(MIN_PARAGRAPH, 8)
        run += 1
    return doc


def _distractors(rng: random.Random, names: Sequence[str], attributes: Sequence[str], n: int) -> list[Fact]:
    """`n` facts of other people; every (name, attribute) pair at most once."""
    pairs = [(name, a) for name in names for a in attributes]
    return [make_fact(rng, name, a) for name, a in rng.sample(pairs, min(n, len(pairs)))]


def _plan(rng: random.Random, task: str, room: int) -> tuple[list[Fact], list[Question]]:
    """Facts of the document and the questions (the last one counts) for one evaluation sample."""
    key, second, *others = rng.sample(w.EVAL_NAMES, len(w.EVAL_NAMES))
    others += rng.sample(w.TRAIN_NAMES, 60)
    attribute, *rest = rng.sample(ATTRIBUTES, len(ATTRIBUTES))
    many = max(2, int(0.3 * room) // FACT_TOKENS)
    few = max(2, int(0.12 * room) // FACT_TOKENS)
    target = make_fact(rng, key, attribute)
    if task == "single":
        return [target, *_distractors(rng, others, rest, few)], [ask_one(target)]
    if task == "multikey":
        own = [make_fact(rng, key, a) for a in rest[:2]]
        return [target, *own, *_distractors(rng, others, [attribute], many)], [ask_one(target, task)]
    if task == "twohop":
        link = neighbor_fact(key, second)
        goal, decoy = make_fact(rng, second, attribute), make_fact(rng, key, attribute)
        links = [neighbor_fact(others[i], others[i + 1]) for i in range(0, 2 * (few // 2), 2)]
        noise = _distractors(rng, others, ATTRIBUTES, few // 2)
        return [link, goal, decoy, *links, *noise], [ask_hop(link, goal)]
    if task == "list":
        own = [make_fact(rng, key, a) for a in (attribute, *rest)]
        asked = own[: rng.randint(3, 6)]
        return [*own, *_distractors(rng, others, ATTRIBUTES, few)], [ask_list(asked)]
    if task == "followup":
        goal = make_fact(rng, second, rng.choice(ATTRIBUTES))
        noise = _distractors(rng, others, ATTRIBUTES, many)
        return [target, goal, *noise], [ask_one(target), ask_one(goal, task)]
    if task == "recite":
        roll = roll_fact(rng, min(RECITE_MAX_WORDS, room // RECITE_SHARE))
        return [roll, *_distractors(rng, others, rest, few)], [ask_roll(roll)]
    raise ValueError(f"unknown task {task!r}; known: {', '.join(TASKS)}")


def chat(doc: Document, questions: Sequence[Question]) -> list[dict[str, str]]:
    """Messages of a conversation about `doc`, up to the last question."""
    messages: list[dict[str, str]] = []
    for i, q in enumerate(questions):
        messages.append({"role": "user", "content": q.text if i else f"{doc.text}\n{q.text}"})
        if i + 1 < len(questions):
            messages.append({"role": "assistant", "content": q.answer})
    return messages


def prompt_ids(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of the chat-templated prompt, generation header included."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def eval_samples(task: str, context_tokens: int, n: int, seed: int, tokenizer) -> list[Sample]:
    """`n` samples whose whole prompt (template included) is just under `context_tokens` tokens.

    Works with any tokenizer that has a chat template; lengths are counted with that tokenizer.
    """
    samples = []
    cache: dict[str, int] = {}

    def length(sentence: str) -> int:
        if sentence not in cache:
            cache[sentence] = len(tokenizer(" " + sentence, add_special_tokens=False)["input_ids"])
        return cache[sentence]

    for i in range(n):
        rng = random.Random(f"{seed}/{task}/{context_tokens}/{i}")
        cache.clear()
        overhead = len(prompt_ids(tokenizer, [{"role": "user", "content": "\n"}]))
        facts, questions = _plan(rng, task, context_tokens - overhead)
        turns = chat(Document(), questions)
        room = context_tokens - len(prompt_ids(tokenizer, turns))
        doc = arrange(rng, facts, w.NAMES, room, length)
        messages = chat(doc, questions)
        last = questions[-1]
        used = len(prompt_ids(tokenizer, messages))
        evidence = tuple(f.sentence for f in last.facts)
        samples.append(Sample(task, messages, last.answer, context_tokens, used, evidence))
    return samples


def main(argv: list[str] | None = None) -> None:
    """Print samples as JSON lines: messages for a chat completion and the exact expected answer."""
    from .tokenizer import load_tokenizer

    p = argparse.ArgumentParser(description=main.__doc__)
    p.add_argument("--task", choices=TASKS, default="multikey")
    p.add_argument("--tokens", type=int, default=1024, help="prompt length")
    p.add_argument("-n", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--tokenizer", default=str(Path(__file__).parent / "models" / "target"))
    args = p.parse_args(argv)
    for s in eval_samples(args.task, args.tokens, args.n, args.seed, load_tokenizer(args.tokenizer)):
        print(json.dumps(asdict(s)))


if __name__ == "__main__":
    main()
