"""SpecPrefill's kept tokens from a Transformers draft, prompt by prompt: nothing cached, each step from scratch."""

import torch
from oracles import specprefill
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class Draft:
    """A draft model in float32."""

    def __init__(self, folder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def look_ahead(self, prompt: list[int], steps: int, ends: set[int]) -> list[int]:
        """What the draft says after the prompt, greedily, up to and with an end."""
        said: list[int] = []
        while len(said) < steps and not (said and said[-1] in ends):
            logits = self.model(torch.tensor([prompt + said]), use_cache=False).logits[0, -1]
            said.append(int(logits.argmax()))
        return said

    @torch.no_grad()
    def queries_and_keys(self, tokens: list[int], rows: list[int]):
        """Per layer the rotated queries of ``rows`` [rows, heads, dim] and keys [tokens, kv_heads, dim]."""
        layers = self.model.model.layers
        inputs: dict = {}
        hooks = [
            layer.self_attn.register_forward_pre_hook(
                lambda module, args, known, i=i: inputs.update({i: known}), with_kwargs=True
            )
            for i, layer in enumerate(layers)
        ]
        self.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        queries, keys = [], []
        for i, layer in enumerate(layers):
            attention = layer.self_attn
            hidden, (cos, sin) = inputs[i]["hidden_states"], inputs[i]["position_embeddings"]
            shape = (1, len(tokens), -1, attention.head_dim)
            q = attention.q_proj(hidden).view(shape).transpose(1, 2)
            k = attention.k_proj(hidden).view(shape).transpose(1, 2)
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            queries.append(q[0].transpose(0, 1)[rows])
            keys.append(k[0].transpose(0, 1))
        return queries, keys

    def kept(self, prompt, rate, spans=(), steps=8, ends=frozenset(), chunk=32, asked=None) -> list[int]:
        """Positions of the prompt that enter the target; ``asked``: the rows whose queries judge it, if not all."""
        said = self.look_ahead(prompt, steps, ends)
        queried = [token for token in said[: steps - 1] if token not in ends]
        rows = list(range(len(prompt) - 1, len(prompt) + len(queried)))
        rows = rows if asked is None else [rows[i] for i in asked]
        queries, keys = self.queries_and_keys(prompt + queried, rows)
        prompt_keys = [key[: len(prompt)] for key in keys]
        scale = self.model.model.layers[0].self_attn.head_dim ** -0.5
        scores = specprefill.token_scores(queries, prompt_keys, scale)
        return specprefill.kept_tokens(scores, spans, rate, chunk)


def sets(entered, cutoff="full", anchors="bos"):
    """Which prompt tokens exist at which layer: what entered, and above a cutoff what SPEED leaves of it."""

    def kept(layer, prompt_tokens):
        if cutoff == "full" or layer < cutoff:
            return set(entered)
        return {prompt_tokens - 1} | ({0} if anchors == "bos" else set())

    return kept
