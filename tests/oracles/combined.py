"""All mechanisms at once, one request: a plain PyTorch model with explicit masks, in float32.

What a token is computed with, layer by layer: the prompt tokens that entered (SpecPrefill), those that went on
above the selection layer and the entries that each KV head kept (FastKV), those that exist above the cutoff
(SPEED), and what a decode step reads of all that (Slow-Fast Inference). Drafting changes no greedy token, so it has
no place here.

A layer with a sliding window sees what there is of the last positions, always all of it: FastKV keeps its last
entries there and takes its scores from a layer below the selection that sees everything.

Works on Transformers models of any family. The rules of selection are those of ``oracles/sfi.py`` and
``oracles/fastkv.py``. Shares no code with the engine.
"""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from oracles import attending, fastkv, sfi

WINDOW = 8


@dataclass(frozen=True)
class Prefill:
    """What is computed and kept of a prompt.

    Attributes:
        entered: positions that enter the model; None for all.
        tsp_layer: layers that see all of them; tsp_rate: share of them that the others see.
        retention: share that each KV head keeps; rule: "saliency" or "streaming".
        cutoff: layers that see more than the anchors and the last prompt token; None for all.
        anchors: "bos" or "none".
    """

    entered: Collection[int] | None = None
    tsp_layer: int | None = None
    tsp_rate: float = 1.0
    retention: float = 1.0
    rule: str = "saliency"
    cutoff: int | None = None
    anchors: str = "bos"


@dataclass(frozen=True)
class Decode:
    """What decode steps read; ``settings`` None for everything.

    Attributes:
        triggers: ids after which a step is slow.
        rule: "fused", "frozen", "random" or "none".
        seed: of a choice at random.
    """

    settings: sfi.Settings | None = None
    triggers: Collection[int] = ()
    rule: str = "fused"
    seed: int = 0


@dataclass
class Answer(sfi.Generation):
    """As :class:`sfi.Generation`, and what the prompt left behind.

    Attributes:
        sets: [layer] positions of the prompt that are computed; kept: [layer][KV head] positions that stay.
        causes: per decode step why its selection was renewed ("start", "trigger", "timeout"), or None.
    """

    sets: list[list[int]] = field(default_factory=list)
    kept: list[list[list[int]]] = field(default_factory=list)
    causes: list[str | None] = field(default_factory=list)


def of_policy(
    policy: Mapping[str, Any] | None,
    prompt: Sequence[int],
    tsp_layer: int | None = None,
    entered: Callable[[float], Collection[int]] | None = None,
    settings: sfi.Settings | None = None,
    triggers: Collection[int] = (),
) -> tuple[Prefill, Decode]:
    """What a request's ``fathom`` object asks for.

    Args:
        tsp_layer: of the server. entered: what the draft lets into the model at a keep rate.
        settings: the server's numbers of slow-fast decoding; triggers: as in :class:`Decode`.
    """
    p = dict(policy or {})
    rate, cutoff = p.get("prefill_keep_rate", 1.0), p.get("depth_cutoff", "full")
    judged = rate != 1.0 and len(prompt) >= p.get("min_prompt_tokens", 4096)
    prefill = Prefill(
        entered(rate) if judged else None,
        tsp_layer,
        p.get("tsp_rate", 1.0),
        p.get("kv_retention_rate", 1.0),
        p.get("retention_policy", "saliency"),
        None if cutoff == "full" else cutoff,
        p.get("anchors", "bos"),
    )
    if p.get("decode", "full") == "full":
        return prefill, Decode()
    budget, window = p.get("sfi_budget", "server"), p.get("sfi_window", "server")
    s = replace(
        settings,
        k=settings.k if budget == "server" else budget,
        recent=settings.recent if window == "server" else window,
    )
    rule = p.get("sfi_selection", "fused")
    return prefill, Decode(s, triggers, rule, random_seed(prompt))


def random_seed(prompt: Sequence[int], sampling_seed: int | None = None) -> int:
    """The seed of a choice at random that follows from a prompt."""
    told = repr([sampling_seed, *prompt]).encode()
    return int.from_bytes(hashlib.blake2s(told, digest_size=7).digest(), "big")


def murmur3(data: bytes) -> int:
    """MurmurHash3, x86, 32 bit, seed 0, of a multiple of four bytes."""

    def left(x: int, bits: int) -> int:
        return (x << bits | x >> (32 - bits)) & 0xFFFFFFFF

    state = 0
    for at in range(0, len(data), 4):
        block = left(int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF, 15)
        state = left(state ^ block * 0x1B873593 & 0xFFFFFFFF, 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def drawn(seed: int, length: int, layer: int, head: int, entry: int) -> float:
    """A number at random for one entry of one head, as float32 has it."""
    data = seed.to_bytes(8, "little")
    for low, high in ((length, layer), (entry, head)):
        data += low.to_bytes(3, "little") + high.to_bytes(1, "little")
    return float(torch.tensor(murmur3(data), dtype=torch.float32))


class Combined(sfi.CachedModel):
    """One request on a model.

    Attributes:
        there: [layers, kv_heads, capacity] bool, the positions that a KV head holds.
    """

    def __init__(self, model, capacity: int) -> None:
        super().__init__(model, capacity)
        self.there = torch.ones(*self.keys.shape[:2], capacity, dtype=torch.bool)
        self.windows = attending.windows(model)

    def judge(self, tsp_layer: int) -> int:
        """The layer whose attention selects the tokens that ``tsp_layer`` and those above it see."""
        return max(i for i in range(tsp_layer) if self.windows[i] is None)

    def everything(self, layer: int) -> torch.Tensor:
        """What the last token reads that reads all it can: [kv_heads, 1, length]."""
        near = attending.near([self.length - 1], self.length, self.windows[layer])
        return self.there[layer, :, None, : self.length] & near

    def prefill(self, prompt: Sequence[int], how: Prefill, answer: Answer) -> torch.Tensor:
        """Logits of the last prompt token [vocabulary]; sets and kept entries go to ``answer``."""
        n, self.length = len(prompt), len(prompt)
        exists = list(range(n)) if how.entered is None else sorted(how.entered)
        count, chosen = len(exists), exists

        def attend(i, q, k, v, scale):
            nonlocal exists, chosen
            if how.tsp_rate < 1 and i == how.tsp_layer:
                exists = chosen
            if how.cutoff is not None and i == how.cutoff:
                exists = sorted({n - 1} | ({0} if how.anchors == "bos" else set()))
            self.keys[i, :, :n], self.values[i, :, :n] = k, v
            selects = how.tsp_layer is not None and how.tsp_rate < 1 and i == self.judge(how.tsp_layer)
            matrix = None
            windowed = self.windows[i] is not None
            if selects or (how.retention < 1 and how.rule == "saliency" and not windowed):
                matrix = fastkv.attention(*(x[:, exists].transpose(0, 1) for x in (q, k)), scale)
            kept = self._kept(matrix, exists, count, how, windowed)
            answer.sets.append(exists)
            answer.kept.append(kept)
            self.there[i, :, :n] = False
            for head, positions in enumerate(kept):
                self.there[i, head, positions] = True
            visible = attending.only(exists, n) & attending.near(range(n), n, self.windows[i])
            mixed, _ = attending.masked(q, k, v, visible, scale)
            if selects:
                forced = [0] if how.cutoff is not None and how.anchors == "bos" else []
                scores = fastkv.saliency(matrix, 1, WINDOW)[0]
                best = fastkv.keep(scores, len(exists), count, how.tsp_rate, WINDOW, forced)
                chosen = [exists[j] for j in best]
            return mixed

        return attending.forward(self.model, prompt, attend)[-1]

    def _kept(self, matrix, exists: list[int], count: int, how: Prefill, windowed: bool) -> list[list[int]]:
        if how.retention == 1:
            return [exists] * self.kv_heads
        before = max(len(exists) - WINDOW, 0)
        if windowed:
            scores = [[float(j) for j in range(before)]] * self.kv_heads
        elif how.rule == "streaming":
            scores = [[float("inf") if j < 4 else float(j) for j in range(before)]] * self.kv_heads
        else:
            scores = fastkv.saliency(matrix, self.kv_heads, WINDOW)
        return [
            [exists[j] for j in fastkv.keep(head, len(exists), count, how.retention, WINDOW)]
            for head in scores
        ]

    def table(self, layer: int, head: int) -> torch.Tensor:
        """Positions that a KV head holds, ascending."""
        return self.there[layer, head, : self.length].nonzero().flatten()

    def choose(self, observed: list[torch.Tensor], s: sfi.Settings, how: Decode) -> list[list[list[int]]]:
        """[layer][KV head] positions, from the attention logits of the current token."""
        found = []
        for i, scores in enumerate(observed):
            if self.windows[i] is not None:
                found.append([])
                continue
            tables = [self.table(i, head) for head in range(self.kv_heads)]
            size = len(tables[0])  # the same for all heads
            candidates = range(s.sink, max(size - s.recent, s.sink))
            if how.rule == "none":
                chosen = [[] for _ in tables]
            elif how.rule == "random":
                chosen = [self._at_random(i, head, candidates, s, how.seed) for head in range(self.kv_heads)]
            else:
                logits = [rows[..., own].reshape(-1, size) for rows, own in zip(scores, tables, strict=True)]
                norms = [k[own].norm(dim=-1) for k, own in zip(self.keys[i], tables, strict=True)]
                chosen = sfi.selector(logits, norms, candidates, s)
            found.append([own[head].tolist() for own, head in zip(tables, chosen, strict=True)])
        return found

    def _at_random(self, layer: int, head: int, candidates: range, s: sfi.Settings, seed: int) -> list[int]:
        best = sorted(candidates, key=lambda j: (-drawn(seed, self.length, layer, head, j), j))
        return sorted(best[: s.k])

    def fast(self, selection: list[list[list[int]]], whole: list[bool], s: sfi.Settings):
        """Mask of a fast step that reads a new token at ``self.length``: layer -> [kv_heads, 1, length + 1]."""

        def visible(layer: int) -> torch.Tensor:
            if whole[layer] or self.windows[layer] is not None:
                return self.everything(layer)
            mask = torch.zeros(self.kv_heads, 1, self.length, dtype=torch.bool)
            for head in range(self.kv_heads):
                own = self.table(layer, head)
                mask[head, 0, own[: s.sink]] = True
                mask[head, 0, own[-s.recent :]] = True
                mask[head, 0, selection[layer][head]] = True
            return mask

        return visible


@torch.inference_mode()
def generate(
    model,
    prompt: Sequence[int],
    new_tokens: int,
    prefill: Prefill = Prefill(),
    decode: Decode = Decode(),
    force: Callable[[int], int | None] = lambda i: None,
    taken_back: int = 0,
) -> Answer:
    """Greedy decoding of ``new_tokens`` tokens (no stop at EOS).

    Args:
        force: token i of the answer, in place of the most likely one; None for that one.
        taken_back: tokens after which the request was taken back: they are computed again, each with everything in
            sight, and a slow step follows.
    """
    answer = Answer()
    one = Combined(model, len(prompt) + new_tokens)
    logits = one.prefill(prompt, prefill, answer)
    s, since, selection, whole = decode.settings, 0, None, []
    boundary = False

    def put_out(logits: torch.Tensor) -> None:
        forced = force(len(answer.tokens))
        answer.tokens.append(int(logits.argmax()) if forced is None else forced)
        answer.logits.append(logits)

    put_out(logits)
    while len(answer.tokens) < new_tokens:
        again = len(answer.tokens) <= taken_back
        boundary = not again and (boundary or answer.tokens[-1] in decode.triggers)
        slow = again or s is None or selection is None or since >= s.t_max or (boundary and since >= s.gap)
        cause = "start" if selection is None else "trigger" if boundary else "timeout"
        renewed = None
        if slow:
            logits, observed = one.forward(answer.tokens[-1:], one.everything)
            # There is nothing to reuse before all sink tokens exist: shorter contexts stay slow.
            if s is not None and not again and one.length >= s.sink:
                if selection is None or decode.rule != "frozen":
                    renewed = selection = one.choose(observed, s, decode)
                    whole = [len(one.table(i, 0)) < s.sink for i in range(len(observed))]
                since, boundary = 0, False
        else:
            logits, _ = one.forward(answer.tokens[-1:], one.fast(selection, whole, s))
            since += 1
        answer.slow.append(slow)
        answer.selected.append(renewed)
        answer.causes.append(None if renewed is None else cause)
        put_out(logits)
    return answer
