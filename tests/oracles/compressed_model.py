"""A Transformers model under FastKV: explicit masks per KV head, selections by ``oracles/fastkv.py``.

Shares no code with the engine. Every position is computed at every layer; one that does not exist at a layer is
never a key there, so what is computed for it has no effect.
"""

import torch
from oracles import fastkv as rules
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

WINDOW = 8


class CompressedModel:
    """Log-probabilities of a Llama whose layers drop prompt tokens, and whose heads drop entries."""

    def __init__(self, folder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )

    @torch.no_grad()
    def log_probs(
        self,
        prompt,
        generated,
        tsp_layer=None,
        tsp_rate=1.0,
        retention=1.0,
        rule="saliency",
        cutoff=None,
        anchors="bos",
        entered=None,
    ):
        """Log-probabilities of the token after each position from the last prompt token on.

        Args:
            prompt, generated: token ids.
            tsp_layer: layers that see all tokens that entered; tsp_rate: share of them that the others see.
            retention: share that each KV head keeps; rule: "saliency" or "streaming".
            cutoff: layers that see more than the anchors and the last prompt token; None for all.
            entered: positions of the prompt that enter the model; None for all.

        Returns:
            [len(generated) + 1, vocabulary] float32; beside it ``self.sets`` [layer] of positions seen, and
            ``self.kept`` [layer][KV head] of positions kept.
        """
        n, base = len(prompt), self.model.model
        tokens = torch.tensor([list(prompt) + list(generated)])
        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        hidden = base.embed_tokens(tokens)
        rotary = base.rotary_emb(hidden, positions)
        exists = list(range(n)) if entered is None else sorted(entered)
        count, self.sets, self.kept = len(exists), [], []
        for number, layer in enumerate(base.layers):
            if cutoff is not None and number == cutoff:
                exists = sorted({n - 1} | ({0} if anchors == "bos" else set()))
            normed = layer.input_layernorm(hidden)
            q, k, v = (
                project(normed).view(1, -1, heads, self.dim).transpose(1, 2)
                for project, heads in (
                    (layer.self_attn.q_proj, self.heads),
                    (layer.self_attn.k_proj, self.kv_heads),
                    (layer.self_attn.v_proj, self.kv_heads),
                )
            )
            q, k = apply_rotary_pos_emb(q, k, *rotary)
            matrix = rules.attention(
                q[0, :, exists].transpose(0, 1), k[0, :, exists].transpose(0, 1), self.scale
            )
            kept = self._kept(matrix, exists, count, retention, rule)
            self.sets.append(exists)
            self.kept.append(kept)
            hidden = hidden + layer.self_attn.o_proj(self._attend(q, k, v, exists, kept, n))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if tsp_layer is not None and tsp_rate < 1 and number == tsp_layer - 1:
                forced = [0] if cutoff is not None and anchors == "bos" else []
                scores = rules.saliency(matrix, 1, WINDOW)[0]
                chosen = rules.keep(scores, len(exists), count, tsp_rate, WINDOW, forced)
                exists = [exists[i] for i in chosen]
        return self.model.lm_head(base.norm(hidden)[0, n - 1 :]).float().log_softmax(-1)

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def _kept(self, matrix, exists, count, retention, rule):
        if retention == 1:
            return [exists] * self.kv_heads
        before = max(len(exists) - WINDOW, 0)
        scores = rules.saliency(matrix, self.kv_heads, WINDOW)
        if rule == "streaming":
            scores = [[float("inf") if i < 4 else float(i) for i in range(before)]] * self.kv_heads
        return [[exists[i] for i in rules.keep(s, len(exists), count, retention, WINDOW)] for s in scores]

    def _attend(self, q, k, v, exists, kept, n):
        total, share = q.shape[2], self.heads // self.kv_heads
        causal = torch.ones(total, total, dtype=torch.bool).tril()
        outputs = []
        for head in range(self.heads):
            visible = torch.zeros(total, total, dtype=torch.bool)
            visible[:n, exists] = True
            visible[n:, kept[head // share]] = True
            visible[n:, n:] = True
            visible = (visible & causal) | torch.eye(total, dtype=torch.bool)
            logits = q[0, head] @ k[0, head // share].T * self.scale
            outputs.append(logits.masked_fill(~visible, float("-inf")).softmax(-1) @ v[0, head // share])
        return torch.cat(outputs, -1).unsqueeze(0)
