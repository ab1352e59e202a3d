"""Small random models some of whose layers look back over a window of positions only."""

from conftest import save_random_model

S, F = "sliding_attention", "full_attention"


def save_windowed(folder, kinds, window=16, **changes):
    """An OLMo 3 in float32.

    Args:
        kinds: of its layers.
    """
    folder.mkdir()
    shape = {"layer_types": list(kinds), "num_hidden_layers": len(kinds), "num_key_value_heads": 4}
    return save_random_model(folder, "Olmo3", head_dim=16, sliding_window=window, **shape | changes)
