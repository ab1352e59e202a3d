"""A Transformers model in which each layer sees its own set of prompt tokens: explicit masks, nothing cached.

Shares no code with the engine. Every position is computed at every layer; a position that does not exist at a layer
is never a key there, so what is computed for it has no effect.
"""

import torch
from transformers import AutoModelForCausalLM


class NarrowedModel:
    """Log-probabilities of a model whose layer ``l`` sees the prompt tokens that ``kept(l)`` names."""

    def __init__(self, folder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.layers = len(self.model.model.layers)

    @torch.no_grad()
    def log_probs(self, prompt, generated, kept):
        """Log-probabilities of the token after each position from the last prompt token on.

        Args:
            prompt, generated: token ids.
            kept: kept(layer, prompt length) -> set of prompt positions that exist at that layer (from 0).

        Returns:
            [len(generated) + 1, vocabulary] float32.
        """
        tokens = torch.tensor([list(prompt) + list(generated)])
        total, base = tokens.shape[1], self.model.model
        hidden = base.embed_tokens(tokens)
        positions = torch.arange(total).unsqueeze(0)
        rotary = base.rotary_emb(hidden, positions)
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        for number, layer in enumerate(base.layers):
            exists = torch.zeros(total, dtype=torch.bool)
            exists[sorted(kept(number, len(prompt)))] = True
            exists[len(prompt) :] = True
            visible = causal & (exists | torch.eye(total, dtype=torch.bool))
            mask = torch.zeros(total, total).masked_fill(~visible, float("-inf"))
            output = layer(
                hidden, attention_mask=mask[None, None], position_ids=positions, position_embeddings=rotary
            )
            hidden = output[0] if isinstance(output, tuple) else output
        rows = base.norm(hidden)[0, len(prompt) - 1 :]
        return self.model.lm_head(rows).float().log_softmax(-1)


def speed(cutoff, anchors="bos"):
    """SPEED: from layer ``cutoff`` (counted from 0) on, only the anchors and the last prompt token exist."""

    def kept(layer, prompt_tokens):
        if cutoff == "full" or layer < cutoff:
            return set(range(prompt_tokens))
        return {prompt_tokens - 1} | ({0} if anchors == "bos" else set())

    return kept
