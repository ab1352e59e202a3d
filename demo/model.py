"""The trainer's Llama: the same arithmetic as Transformers' LlamaForCausalLM, compiled layer by layer."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COPY_INIT = 0.5


@dataclass(frozen=True)
class ModelConfig:
    """Shapes of a Llama with tied embeddings. `guides` are the (layer, KV group) pairs, zero-based, whose
    query heads are trained to look at copy or topic guides."""

    vocab: int
    hidden: int = 192
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ffn: int = 384
    rope_base: float = 1e5
    eps: float = 1e-5
    copy_guides: tuple[tuple[int, int], ...] = ((2, 1), (3, 1))
    topic_guides: tuple[tuple[int, int], ...] = ((3, 0),)

    def as_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict) -> ModelConfig:
        pairs = {k: tuple(tuple(p) for p in data[k]) for k in ("copy_guides", "topic_guides")}
        return ModelConfig(**{**data, **pairs})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float32, output in x's dtype. x: [..., hidden]."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * h.to(x.dtype)


def rope_tables(positions: Tensor, cfg: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin tables [B or 1, T, head_dim] for integer `positions` [B or 1, T]."""
    inverse = 1.0 / (cfg.rope_base ** (torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim))
    angle = positions[..., None].float() * inverse
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE. x: [B, H, T, head_dim]."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


def blocked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by blocks of queries, for compiled bf16 training on CPU: forward and backward take 35 to
    60 % less time than the fused CPU kernel. q: [B, H, T, d], k and v: [B, KV, T, d]; returns [B, H, T, d]."""
    b, heads, total, d = q.shape
    groups = k.shape[1]
    share, out = heads // groups, []
    block = -(-total // (4 if total <= 1024 else 6))
    for begin in range(0, total, block):
        end = min(total, begin + block)
        rows = (q[:, :, begin:end] * d**-0.5).reshape(b, groups, share * (end - begin), d)
        scores = (rows @ k[:, :, :end].mT).view(b, groups, share, end - begin, end).float()
        future = torch.arange(end) > torch.arange(begin, end)[:, None]
        weights = scores.masked_fill(future, -1e9).softmax(-1).to(q.dtype)
        out.append((weights.view(b, groups, -1, end) @ v[:, :, :end]).view(b, heads, end - begin, d))
    return torch.cat(out, 2)


class Layer(nn.Module):
    """One pre-norm Llama block with grouped-query attention and SwiGLU."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        width, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim

        def matrix(rows: int, cols: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols) / math.sqrt(cols))

        self.q, self.k, self.v = matrix(width, cfg.hidden), matrix(kv, cfg.hidden), matrix(kv, cfg.hidden)
        self.o = nn.Parameter(torch.zeros(cfg.hidden, width))
        self.gate, self.up = matrix(cfg.ffn, cfg.hidden), matrix(cfg.ffn, cfg.hidden)
        self.down = nn.Parameter(torch.zeros(cfg.hidden, cfg.ffn))
        self.norm1, self.norm2 = nn.Parameter(torch.ones(cfg.hidden)), nn.Parameter(torch.ones(cfg.hidden))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [B, heads, T, d], rotated keys and values [B, kv_heads, T, d]."""
        c, (b, t, _) = self.cfg, x.shape
        h = rms_norm(x, self.norm1, c.eps)
        y = F.linear(h, torch.cat([self.q, self.k, self.v]).to(x.dtype))
        kv = c.kv_heads * c.head_dim
        q, k, v = y.split([c.heads * c.head_dim, kv, kv], -1)
        q, k, v = (z.view(b, t, -1, c.head_dim).transpose(1, 2) for z in (q, k, v))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Output projection, residual and SwiGLU. attended: [B, heads, T, d]."""
        c, (b, t, _) = self.cfg, x.shape
        x = x + F.linear(attended.transpose(1, 2).reshape(b, t, -1), self.o.to(x.dtype))
        h = rms_norm(x, self.norm2, c.eps)
        gate, up = F.linear(h, torch.cat([self.gate, self.up]).to(x.dtype)).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down.to(x.dtype))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None, keep: bool = False):
        """x [B, T, hidden]; `mask` [B, 1, T, T] True where visible (causal if None); `keep` adds q and k."""
        q, k, v = self.project(x, cos, sin)
        if mask is None and x.dtype == torch.bfloat16:
            attended = blocked_attention(q, k, v)
        else:
            r = self.cfg.heads // self.cfg.kv_heads
            ks, vs = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
            attended = F.scaled_dot_product_attention(q, ks, vs, attn_mask=mask, is_causal=mask is None)
        out = self.finish(x, attended)
        return (out, q, k) if keep else out


class Llama(nn.Module):
    """Decoder with tied embeddings."""

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.cfg = cfg
        self.embedding = nn.Parameter(torch.randn(cfg.vocab, cfg.hidden) * 0.4)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))
        self.norm = nn.Parameter(torch.full((cfg.hidden,), 0.06))
        self.compiled: list | None = None

    def compile_layers(self) -> None:
        """Compile every layer's forward; one graph serves all layers of equal shape."""
        torch._dynamo.config.cache_size_limit = 64
        step = torch.compile(Layer.forward, dynamic=False)
        self.compiled = [lambda *a, m=layer, **k: step(m, *a, **k) for layer in self.layers]

    def hidden_states(
        self, ids: Tensor, dtype: torch.dtype = torch.bfloat16, mask: Tensor | None = None, keep: bool = False
    ) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """Normalised final states [B, T, hidden] and, with `keep`, {guided layer: (q, k)}."""
        cos, sin = rope_tables(torch.arange(ids.shape[1])[None], self.cfg, dtype)
        x = F.embedding(ids, self.embedding).to(dtype)
        guided = {layer for layer, _ in self.cfg.copy_guides + self.cfg.topic_guides} if keep else set()
        kept = {}
        for i, layer in enumerate(self.compiled or self.layers):
            if i in guided:
                x, q, k = layer(x, cos, sin, mask, True)
                kept[i] = (q, k)
            else:
                x = layer(x, cos, sin, mask)
        return rms_norm(x, self.norm, self.cfg.eps), kept

    def forward(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Logits [B, T, vocab]."""
        return F.linear(self.hidden_states(ids, dtype)[0], self.embedding.to(dtype))


@torch.no_grad()
def structured_init(model: Llama) -> None:
    """Initialisation under which retrieval emerges within a few hundred thousand tokens.

    Down projections start at zero, later layers' queries start correlated with their keys and output
    projections as their values' transpose (an attended token is copied), and the first layer's heads start as
    fixed-lag heads (1, 2, 3 and 5 tokens back) driven by a constant embedding channel.
    """
    cfg = model.cfg
    share = cfg.heads // cfg.kv_heads
    for layer in list(model.layers)[1:]:
        k = layer.k.view(cfg.kv_heads, 1, cfg.head_dim, cfg.hidden).expand(-1, share, -1, -1)
        layer.q.mul_(0.8).add_(k.reshape(layer.q.shape), alpha=0.6)
        v = layer.v.view(cfg.kv_heads, 1, cfg.head_dim, cfg.hidden).expand(-1, share, -1, -1)
        layer.o.copy_(COPY_INIT * v.reshape(layer.q.shape).T)
    model.embedding[:, 0] = 1.2
    constant = 1.2 / math.sqrt(0.16 + 1.44 / cfg.hidden)
    half = cfg.head_dim // 2
    theta = 1.0 / (cfg.rope_base ** (torch.arange(half).float() / half))
    first = model.layers[0]
    q, k = first.q.view(cfg.heads, cfg.head_dim, -1), first.k.view(cfg.kv_heads, cfg.head_dim, -1)
    first.v[:, 0] = 0
    for m in (q, k):
        m.mul_(0.3)
        m[:, :, 0] = 0
    index = torch.arange(half)
    out = torch.randn(cfg.kv_heads, cfg.hidden, cfg.head_dim) * (0.3 / 8)
    out[:, 0] = 0
    for h in range(cfg.heads):
        group = h // share
        band = ((index >= 2) & (index <= 9)) if group == 0 else index <= 7
        lag = ((3.0, 5.0) if group == 0 else (1.0, 2.0))[h % 2]
        scale = math.sqrt((14.0 if group == 0 else 22.0) * 8 / band.sum().item()) / constant
        k[group, :half, 0] = scale * band
        q[h, :half, 0] = scale * band * torch.cos(lag * theta)
        q[h, half:, 0] = -scale * band * torch.sin(lag * theta)
        first.o[:, h * cfg.head_dim : (h + 1) * cfg.head_dim] = out[group]


@torch.no_grad()
def grow(model: Llama, small: dict[str, Tensor], places: tuple[int, ...]) -> None:
    """Copy a smaller model's layers to `places` of a deeper one of equal width.

    Layers between them start as no-ops; a new last layer starts as a copying layer. Wider feed-forward blocks
    get additional channels that start at zero output.
    """
    state = model.state_dict()
    state["embedding"], state["norm"] = small["embedding"], small["norm"]
    for i in range(model.cfg.layers):
        state[f"layers.{i}.down"].zero_()
        if i not in places and i + 1 < model.cfg.layers:
            state[f"layers.{i}.o"].zero_()
    for i, place in enumerate(places):
        for name in ("q", "k", "v", "o", "norm1", "norm2"):
            state[f"layers.{place}.{name}"] = small[f"layers.{i}.{name}"]
        width = small[f"layers.{i}.gate"].shape[0]
        for name in ("gate", "up"):
            state[f"layers.{place}.{name}"][:width] = small[f"layers.{i}.{name}"]
        state[f"layers.{place}.down"][:, :width] = small[f"layers.{i}.down"]
    model.load_state_dict(state)
