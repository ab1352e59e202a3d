"""What a model's final hidden state becomes when propagation sits at each candidate layer (FastKV, section 4.3).

Runs a Transformers model layer by layer, outside the engine: one pass over the whole prompt, from whose hidden
states and scores at each candidate the layers above are run again on the tokens that would have gone on.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fathom.kernels.window_scores import pool_saliency, row_mean_scores, window_of
from fathom.runtime.fastkv.config import FastKVConfig
from fathom.runtime.fastkv.select import Sizes, propagated_tokens

ATTENTION = "fathom_probe"
"""Name of the attention function in Transformers' registry; load the model with it."""

States = tuple[torch.Tensor, dict[int, torch.Tensor]]
"""The final hidden state of a full run, and by layer of the run with propagation there."""


class Probe:
    """A decoder-only model, loaded with ``attn_implementation=ATTENTION``, whose attention can be looked into.

    Args:
        model: with ``model.embed_tokens``, ``model.layers``, ``model.rotary_emb`` and ``model.norm``, as the Llama,
            Qwen and Mistral families have them.
        config: rate, window and pooling; its layer is not looked at.
    """

    def __init__(self, model: Any, config: FastKVConfig) -> None:
        self.base, self.config = model.model, config
        self.layers = len(self.base.layers)
        self._window: tuple[torch.Tensor, torch.Tensor, float] | None = None

    @classmethod
    def load(cls, folder: str, config: FastKVConfig, dtype: torch.dtype) -> "Probe":
        """Load a model from a folder or a name on Hugging Face."""
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        probes: list[Probe] = []

        def attention(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **known: Any
        ) -> Any:
            probes[0].look(query, key, float(known.get("scaling") or query.shape[-1] ** -0.5))
            return sdpa_attention_forward(module, query, key, value, mask, **known)

        AttentionInterface.register(ATTENTION, attention)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION
        ).eval()
        probes.append(cls(model, config))
        return probes[0]

    def look(self, query: torch.Tensor, key: torch.Tensor, scale: float) -> None:
        """Called by each layer's attention: queries and keys [1, heads, tokens, dim] after rotary embedding."""
        self._window = query[0, :, -self.config.window :].transpose(0, 1), key[0].transpose(0, 1), scale

    @torch.inference_mode()
    def final_states(self, tokens: Sequence[int], candidates: Sequence[int]) -> States:
        """The last token's hidden state after all layers and the final norm.

        Args:
            tokens: token ids of a prompt; candidates: layers (counted as T: layers ``1 .. T`` see everything).

        Returns:
            [hidden] of the full run, and by candidate of the run with propagation there.
        """
        hidden = self.base.embed_tokens(
            torch.tensor([list(tokens)], device=self.base.embed_tokens.weight.device)
        )
        position = torch.arange(len(tokens), device=hidden.device)
        waiting: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for number in range(1, self.layers + 1):
            hidden = self._layer(number - 1, hidden, position)
            if number in candidates:
                kept = self._choose(len(tokens))
                waiting[number] = hidden[:, kept], position[kept]
        full, selected = self._last(hidden), {}
        for layer, (states, where) in waiting.items():
            for number in range(layer, self.layers):
                states = self._layer(number, states, where)
            selected[layer] = self._last(states)
        return full, selected

    def _layer(self, index: int, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        where = position.unsqueeze(0)
        output = self.base.layers[index](
            hidden,
            attention_mask=None,
            position_ids=where,
            position_embeddings=self.base.rotary_emb(hidden, where),
        )
        return output[0] if isinstance(output, tuple) else output

    def _last(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base.norm(hidden[:, -1:])[0, 0].float().cpu()

    def _choose(self, tokens: int) -> torch.Tensor:
        assert self._window is not None, "the model does not run its attention through Transformers' registry"
        query, keys, scale = self._window
        slots = torch.arange(tokens, device=keys.device).view(1, -1)
        mean = row_mean_scores(
            query, keys.contiguous(), window_of([len(query)], [tokens], slots, True), scale
        )[0]
        sizes = Sizes(tokens, tokens, self.config.window)
        saliency = pool_saliency(mean, sizes.ranked, 1, self.config.pool)
        return propagated_tokens(saliency, sizes, self.config.tsp_rate)


def stack(states: Sequence[States], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[inputs, hidden] of the full runs and of those with propagation at one layer."""
    return torch.stack([full for full, _ in states]), torch.stack([found[layer] for _, found in states])
