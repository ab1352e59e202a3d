"""SpecPrefill's kept tokens from a Transformers draft, prompt by prompt: nothing cached, each step from scratch."""

import torch
from oracles import attending, specprefill
from transformers import AutoModelForCausalLM


class Draft:
    """A draft model in float32."""

    def __init__(self, folder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def _seen(self, layer: int, n: int) -> torch.Tensor:
        window = attending.windows(self.model)[layer]
        return attending.causal(n) & attending.near(range(n), n, window)

    @torch.no_grad()
    def look_ahead(self, prompt: list[int], steps: int, ends: set[int]) -> list[int]:
        """What the draft says after the prompt, greedily, up to and with an end."""
        said: list[int] = []
        while len(said) < steps and not (said and said[-1] in ends):
            logits = attending.forward(
                self.model,
                prompt + said,
                lambda i, q, k, v, scale: attending.masked(q, k, v, self._seen(i, k.shape[1]), scale)[0],
            )
            said.append(int(logits[-1].argmax()))
        return said

    def kept(self, prompt, rate, spans=(), steps=8, ends=frozenset(), chunk=32, asked=None) -> list[int]:
        """Positions of the prompt that enter the target; ``asked``: the rows whose queries judge it, if not all."""
        said = self.look_ahead(prompt, steps, ends)
        tokens = [*prompt, *(token for token in said[: steps - 1] if token not in ends)]
        rows = list(range(len(prompt) - 1, len(tokens)))
        rows = rows if asked is None else [rows[i] for i in asked]
        queries, keys, scales = [], [], set()

        def attend(layer, q, k, v, scale):
            # A layer with a window says nothing of most of the prompt.
            if attending.windows(self.model)[layer] is None:
                queries.append(q[:, rows].transpose(0, 1))
                keys.append(k[:, : len(prompt)].transpose(0, 1))
            scales.add(scale)
            return attending.masked(q, k, v, self._seen(layer, len(tokens)), scale)[0]

        attending.forward(self.model, tokens, attend)
        scores = specprefill.token_scores(queries, keys, *scales)
        return specprefill.kept_tokens(scores, spans, rate, chunk)


def sets(entered, cutoff="full", anchors="bos"):
    """Which prompt tokens exist at which layer: what entered, and above a cutoff what SPEED leaves of it."""

    def kept(layer, prompt_tokens):
        if cutoff == "full" or layer < cutoff:
            return set(entered)
        return {prompt_tokens - 1} | ({0} if anchors == "bos" else set())

    return kept
