"""A Transformers model in which each layer sees its own set of prompt tokens: explicit masks, nothing cached.

Shares no code with the engine. Every position is computed at every layer; a position that does not exist at a layer
is never a key there, so what is computed for it has no effect.
"""

import torch
from oracles import attending
from transformers import AutoModelForCausalLM


class NarrowedModel:
    """Log-probabilities of a model whose layer ``l`` sees the prompt tokens that ``kept(l)`` names."""

    def __init__(self, folder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.layers = len(self.model.model.layers)

    def log_probs(self, prompt, generated, kept):
        """Log-probabilities of the token after each position from the last prompt token on.

        Args:
            prompt, generated: token ids.
            kept: kept(layer, prompt length) -> set of prompt positions that exist at that layer (from 0).

        Returns:
            [len(generated) + 1, vocabulary] float32.
        """
        n, tokens = len(prompt), [*prompt, *generated]

        def attend(layer, q, k, v, scale):
            exists = {*kept(layer, n), *range(n, len(tokens))}
            return attending.masked(q, k, v, attending.only(exists, len(tokens)), scale)[0]

        return attending.forward(self.model, tokens, attend, rows=len(generated) + 1).log_softmax(-1)


def speed(cutoff, anchors="bos"):
    """SPEED: from layer ``cutoff`` (counted from 0) on, only the anchors and the last prompt token exist."""

    def kept(layer, prompt_tokens):
        if cutoff == "full" or layer < cutoff:
            return set(range(prompt_tokens))
        return {prompt_tokens - 1} | ({0} if anchors == "bos" else set())

    return kept
