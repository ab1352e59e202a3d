"""What the papers measured, as data: each constant names its table. Prompt lengths in units of 1,024 tokens."""

SPEED_CUTOFFS = (16, 20, 24, 28)
"""Layers of 32 that see the whole prompt (SPEED, appendix D.1)."""

# Llama-3.1-8B on one GPU; each row: full attention, then the cutoffs above.
SPEED_TTFT_MS = {
    1: (77.64, 47.45, 55.39, 63.29, 70.96),
    2: (118.34, 67.93, 80.85, 93.95, 107.00),
    4: (237.35, 119.95, 149.50, 180.80, 211.95),
    8: (530.77, 267.36, 335.35, 404.41, 473.45),
    16: (1206.27, 607.59, 762.76, 918.59, 1075.02),
    32: (2896.03, 1455.34, 1827.23, 2197.52, 2570.24),
    64: (7674.12, 3833.26, 4818.95, 5788.21, 6783.49),
    128: (22898.60, 11410.25, 14320.81, 17199.90, 20130.24),
}
"""SPEED, Table 15."""

SPEED_TPOT_MS = {
    1: (24.05, 24.06, 24.17, 24.15, 24.17),
    2: (24.22, 24.16, 24.20, 24.11, 24.19),
    4: (24.32, 24.32, 24.18, 24.15, 24.18),
    8: (24.23, 24.17, 24.13, 24.14, 24.18),
    16: (23.97, 24.02, 24.16, 24.16, 24.20),
    32: (24.03, 23.89, 24.15, 24.12, 24.30),
    64: (29.47, 24.03, 24.15, 25.52, 27.54),
    128: (46.96, 30.28, 34.46, 38.64, 42.80),
}
"""SPEED, Table 16."""

SPEED_KV_GIB = {
    1: (0.141, 0.078, 0.094, 0.109, 0.125),
    2: (0.266, 0.141, 0.172, 0.203, 0.234),
    4: (0.516, 0.266, 0.328, 0.391, 0.453),
    8: (1.016, 0.516, 0.641, 0.766, 0.891),
    16: (2.016, 1.016, 1.266, 1.516, 1.766),
    32: (4.016, 2.016, 2.516, 3.016, 3.516),
    64: (8.016, 4.016, 5.016, 6.016, 7.016),
    128: (16.016, 8.016, 10.016, 12.016, 14.016),
}
"""SPEED, Table 17."""

FASTKV_SPEEDUP = {128: (1.82, 2.87)}
"""FastKV, abstract: the most it gains over the full context, in prefill and in decoding; its Figure 4 (8K to 128K,
A100, 256 output tokens, T = 16 of 32, rates 0.2 and 0.1) prints no numbers."""

FASTKV_SCORING = {32: (2.10, 0.04), 64: (5.55, 0.08), 128: (16.99, 0.15)}
"""FastKV, Table 8: prefill and estimation of token importance, in seconds."""

SFI_TOKENS_PER_SECOND = {8: (759.0, None), 128: (65.0, 935.0)}
"""Slow-Fast Inference, text on Figure 4: Qwen3-4B, batch 16, full KV and SFI; at 8K it gives the ratio only."""

SFI_SPEEDUP = {8: 1.91, 128: 14.36}
"""Slow-Fast Inference, text on Figure 4, Qwen3-4B."""

SFI_KERNEL_SPEEDUP = {
    1.6: 10.67,
    6.3: 9.56,
    12.5: 7.15,
    25.0: 3.96,
    37.5: 2.75,
    50.0: 2.10,
    75.0: 1.43,
    98.4: 1.10,
    100.0: 1.00,
}
"""Slow-Fast Inference, Table 1: KV length 16K, batch 16, bfloat16; by retained share in per cent."""
