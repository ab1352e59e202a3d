"""A Transformers model under FastKV: explicit masks per KV head, selections by ``oracles/fastkv.py``.

Shares no code with the engine. Every position is computed at every layer; one that does not exist at a layer is
never a key there, so what is computed for it has no effect.
"""

import torch
from oracles import attending
from oracles import fastkv as rules
from transformers import AutoModelForCausalLM

WINDOW = 8


class CompressedModel:
    """Log-probabilities of a model whose layers drop prompt tokens, and whose heads drop entries."""

    def __init__(self, folder) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.kv_heads = self.model.config.num_key_value_heads

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
        n = len(prompt)
        tokens = [*prompt, *generated]
        exists = list(range(n)) if entered is None else sorted(entered)
        count, self.sets, self.kept = len(exists), [], []

        def attend(layer, q, k, v, scale):
            nonlocal exists
            if cutoff is not None and layer == cutoff:
                exists = sorted({n - 1} | ({0} if anchors == "bos" else set()))
            matrix = rules.attention(q[:, exists].transpose(0, 1), k[:, exists].transpose(0, 1), scale)
            kept = self._kept(matrix, exists, count, retention, rule)
            self.sets.append(exists)
            self.kept.append(kept)
            visible = torch.stack([self._visible(exists, head, n, len(tokens)) for head in kept])
            if tsp_layer is not None and tsp_rate < 1 and layer == tsp_layer - 1:
                forced = [0] if cutoff is not None and anchors == "bos" else []
                scores = rules.saliency(matrix, 1, WINDOW)[0]
                chosen = rules.keep(scores, len(exists), count, tsp_rate, WINDOW, forced)
                exists = [exists[i] for i in chosen]
            return attending.masked(q, k, v, visible, scale)[0]

        rows = attending.forward(self.model, tokens, attend, rows=len(generated) + 1)
        return rows.log_softmax(-1)

    def _kept(self, matrix, exists, count, retention, rule):
        if retention == 1:
            return [exists] * self.kv_heads
        before = max(len(exists) - WINDOW, 0)
        scores = rules.saliency(matrix, self.kv_heads, WINDOW)
        if rule == "streaming":
            scores = [[float("inf") if i < 4 else float(i) for i in range(before)]] * self.kv_heads
        return [[exists[i] for i in rules.keep(s, len(exists), count, retention, WINDOW)] for s in scores]

    @staticmethod
    def _visible(exists, kept, n, total):
        """[total, total] bool of one KV head: the prompt sees what exists, generated tokens what was kept."""
        visible = attending.only([*exists, *range(n, total)], total)
        visible[n:] = attending.only([*kept, *range(n, total)], total)[n:]
        return visible
