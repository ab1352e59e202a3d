"""Training rows: one document, many questions and answers, and where each answer token should look.

Besides the next-token targets a row carries *guides*: for chosen query positions a distribution over earlier
positions that some attention heads are trained to match. They point at the value tokens of the facts an
answer needs, from the end of the question on, so that attention at a boundary reveals what the coming
sentence will read. `copy` guides put most weight on the token to be written next, `topic` guides spread over
all facts of the answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from . import corpus as c
from . import words as w
from .tokenizer import BOS, EOS, ROLES, WordEncoder

NEXT_TOKEN = 0.6
LATER_FACTS = 0.2
SINK_QUERIES = 4
ODD_NAMES = 0.15
FAR = 8
SYSTEM_TEXTS = ("Answer from the text.", "The text is the only source.")
Guide = tuple[int, int, float]


@dataclass
class Row:
    """ids and loss weights of one row [T]; guides are (query position, key position, probability)."""

    ids: list[int]
    weights: list[float]
    spans: list[tuple[int, int, str]] = field(default_factory=list)
    copy: list[Guide] = field(default_factory=list)
    topic: list[Guide] = field(default_factory=list)

    def pad(self, length: int) -> Row:
        """Cut or pad with id 0 and weight 0 to `length`."""
        self.ids = (self.ids + [0] * length)[:length]
        self.weights = (self.weights + [0.0] * length)[:length]
        self.copy = [g for g in self.copy if g[0] < length - 1]
        self.topic = [g for g in self.topic if g[0] < length - 1]
        return self


@dataclass
class World:
    """The facts of one training document and the questions they allow."""

    facts: list[c.Fact]
    people: dict[str, list[c.Fact]]
    links: list[c.Fact]
    roll: c.Fact | None


def make_world(rng: random.Random, n_facts: int, roll_words: int) -> World:
    """Draw people and their facts. Half of the documents concentrate on one attribute (look-alikes).

    In a share of the documents people bear ordinary words for names, so that any word may own a fact.
    """
    pool = w.ROLL_WORDS + w.CITIES if rng.random() < ODD_NAMES else w.TRAIN_NAMES
    strangers = set(rng.sample(w.EVAL_NAMES, len(w.EVAL_NAMES) // 2))
    names = rng.sample(pool, min(len(pool), 160)) + list(strangers)
    rng.shuffle(names)
    people: dict[str, list[c.Fact]] = {}
    links: list[c.Fact] = []
    focus = rng.choice(c.ATTRIBUTES) if rng.random() < 0.5 else None
    count = 0
    while count < n_facts and names:
        name = names.pop()
        able = c.PRACTICE_ATTRIBUTES if name in strangers else c.ATTRIBUTES + c.PRACTICE_ATTRIBUTES
        k = 1 if rng.random() < 0.45 else rng.randint(2, min(6, len(able)))
        attributes = rng.sample(able, k)
        if focus is not None and focus in able and focus not in attributes:
            attributes[0] = focus
        people[name] = [c.make_fact(rng, name, a) for a in attributes]
        count += k
        if rng.random() < 0.5:
            other = names[0] if rng.random() < 0.2 else rng.choice(list(people))
            if other != name:
                links.append(c.neighbor_fact(name, other))
                count += 1
    roll = c.roll_fact(rng, roll_words) if roll_words else None
    facts = [f for own in people.values() for f in own] + links + ([roll] if roll else [])
    return World(facts, people, links, roll)


def draw_question(rng: random.Random, world: World) -> c.Question:
    """One question about the world; kinds that the world does not allow fall back to a single fact."""
    u = rng.random()
    if u < 0.3:
        rich = [own for own in world.people.values() if len(own) >= 3]
        if rich:
            own = rng.choice(rich)
            return c.ask_list(rng.sample(own, rng.randint(3, len(own))))
    elif u < 0.55:
        able = [f for f in world.links if f.sentence.split()[-1][:-1] in world.people]
        if able:
            link = rng.choice(able)
            return c.ask_hop(link, rng.choice(world.people[link.sentence.split()[-1][:-1]]))
    plain = [f for f in world.facts if f.attribute != "roll"]
    return c.ask_one(rng.choice(world.links if world.links and u > 0.93 else plain))


class RowBuilder:
    """Builds rows of exactly `length` tokens from a random generator."""

    def __init__(self, tokenizer):
        self.enc = WordEncoder(tokenizer)
        one = self.enc.word
        self.bos, self.end = one(BOS)[0], one(EOS)[0]
        self.role = {k: one(v)[0] for k, v in ROLES.items()}
        self.newline = one("\n")[0]
        self.vocab = len(tokenizer)

    def value_offsets(self, fact: c.Fact) -> list[int]:
        """Token offsets, within the sentence, of the value tokens (punctuation excluded)."""
        offsets: list[int] = []
        at = 0
        for i, word in enumerate(fact.sentence.split(" ")):
            n = len(self.enc.word(" " + word))
            keep = n - word.endswith(".")
            offsets += range(at, at + keep) if i in fact.values else ()
            at += n
        return offsets

    def document(self, rng: random.Random, world: World, room: int) -> tuple[list[int], dict[str, int]]:
        """Ids of the document and the start offset of every fact sentence."""
        doc = c.arrange(rng, world.facts, w.NAMES, room, lambda s: len(self.enc.sentence(s, True)))
        wanted = {f.sentence for f in world.facts}
        ids: list[int] = []
        starts: dict[str, int] = {}
        for i, sentence in enumerate(doc.sentences):
            first = i == 0 or i in doc.breaks
            if i in doc.breaks:
                ids.append(self.newline)
            if sentence in wanted:
                starts[sentence] = len(ids)
            ids += self.enc.sentence(sentence, not first)
        return ids, starts

    def chat_row(self, rng: random.Random, length: int) -> Row:
        """A document with questions until the row is full."""
        short = length < 1000
        share = rng.uniform(0.45, 0.6) if short else rng.uniform(0.25, 0.45)
        room = int(length * (1 - share))
        density = rng.uniform(0.4, 0.9) if short else rng.uniform(0.12, 0.6)
        roll = rng.randint(8, max(9, min(c.ROLL_MAX_WORDS, room // 4))) if rng.random() < 0.2 else 0
        n_facts = max(3, int((room - roll) * density / c.FACT_TOKENS))
        world = make_world(rng, n_facts, roll)
        ids = [self.bos]
        if rng.random() < 0.15:
            ids += [self.role["system"], *self.enc.sentence(rng.choice(SYSTEM_TEXTS), False), self.end]
        ids.append(self.role["user"])
        doc, starts = self.document(rng, world, room)
        row = Row(ids + doc + [self.newline], [])
        row.weights = [0.0] * len(row.ids)
        starts = {s: at + len(ids) for s, at in starts.items()}
        first = True
        misses = 0
        while misses < 3:
            ask_roll = first and world.roll and len(doc) + roll + 20 < length
            q = c.ask_roll(world.roll) if ask_roll and world.roll else draw_question(rng, world)
            if not self.add_turn(row, q, starts, length, first):
                misses += 1
            first = False
        for t in rng.sample(range(8, len(doc)), SINK_QUERIES):
            row.copy.append((t, 0, 1.0))
            row.topic.append((t, 0, 1.0))
        return row.pad(length)

    def add_turn(self, row: Row, q: c.Question, starts: dict[str, int], length: int, first: bool) -> bool:
        """Append one question and answer if it fits; returns whether it did."""
        head = [] if first else [self.role["user"]]
        head += [*self.enc.sentence(q.text, False), self.end, self.role["assistant"]]
        sentences = [self.enc.sentence(f.sentence, i > 0) for i, f in enumerate(q.facts)]
        answer = [t for s in sentences for t in s] + [self.end]
        if len(row.ids) + len(head) + len(answer) > length:
            return False
        begin = len(row.ids) + len(head)
        row.ids += head + answer
        row.weights += [0.0] * len(head) + [1.0] * len(answer)
        row.spans.append((begin, begin + len(answer), q.task))
        offsets = [self.value_offsets(f) for f in q.facts]
        gold = [[starts[f.sentence] + o for o in own] for f, own in zip(q.facts, offsets, strict=True)]
        self._guide(row, begin, [len(s) for s in sentences], offsets, gold)
        return True

    @staticmethod
    def _guide(
        row: Row, begin: int, lengths: list[int], offsets: list[list[int]], gold: list[list[int]]
    ) -> None:
        """Guides of one answer: the question's last two tokens, then every position that predicts a token."""
        spread = [(g, 1 / (len(gold) * len(own))) for own in gold for g in own]
        for t in (begin - 3, begin - 2):
            row.copy += [(t, g, p) for g, p in spread]
            row.topic += [(t, g, p) for g, p in spread]
        t = begin - 1
        for i, n in enumerate(lengths):
            later = [g for own in gold[i + 1 :] for g in own]
            keep = 1 - LATER_FACTS if later else 1.0
            at = dict(zip(offsets[i], gold[i], strict=True))
            for o in range(n):
                focus = NEXT_TOKEN if o in at else 0.0
                near = gold[i]
                if len(near) >= FAR:
                    near = [g for k, g in at.items() if o <= k < o + FAR] or near[-1:]
                even = (1 - focus) / len(near)
                row.copy += [(t, g, keep * (even + focus * (g == at.get(o)))) for g in near]
                row.copy += [(t, g, LATER_FACTS / len(later)) for g in later]
                wide = spread if len(spread) < 16 else [(g, 1 / len(near)) for g in near]
                row.topic += [(t, g, 0.5 * p + 0.5 / len(near) * (g in gold[i])) for g, p in wide]
                t += 1

    def repeat_row(self, rng: random.Random, length: int) -> Row:
        """A block of random ids, repeated: pure copying, and every embedding gets trained."""
        m = rng.randint(8, min(60, length // 3))
        block = [rng.randrange(len(ROLES) + 3, self.vocab) for _ in range(m)]
        ids = [self.bos]
        while len(ids) < length:
            ids += block
        row = Row(ids, [0.0] * (m + 2) + [1.0] * (len(ids) - m - 2))
        row.copy = [(t, t + 1 - m, 1.0) for t in range(m + 1, length - 1, 2)]
        return row.pad(length)

    def row(self, rng: random.Random, length: int, repeat_share: float) -> Row:
        return self.repeat_row(rng, length) if rng.random() < repeat_share else self.chat_row(rng, length)


def tokenizer_texts(n: int = 12000, seed: int = 1):
    """Text to fit the tokenizer on: filler, facts, questions and answers with all names."""
    rng = random.Random(seed)
    for _ in range(n):
        own = [c.make_fact(rng, rng.choice(w.NAMES), a) for a in c.ATTRIBUTES + c.PRACTICE_ATTRIBUTES]
        link = c.neighbor_fact(rng.choice(w.NAMES), rng.choice(w.NAMES))
        turns = [c.ask_one(own[0]), c.ask_hop(link, own[1]), c.ask_list(own[2:])]
        body = [c.filler(rng, w.NAMES) for _ in range(4)] + [f.sentence for f in own] + [link.sentence]
        rng.shuffle(body)
        yield " ".join([*body, *SYSTEM_TEXTS]) + "\n" + "\n".join(f"{q.text}\n{q.answer}" for q in turns)
        yield c.roll_fact(rng, 20, w.ROLL_WORDS).sentence + "\nRepeat the roll."
