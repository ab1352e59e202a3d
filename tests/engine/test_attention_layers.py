"""What the attention layers of a model ask for, and what is refused of it."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
from sglang.srt.layers.radix_attention import RadixAttention

from fathom.runtime.sglang_host.attention import attention_layers
from fathom.runtime.sglang_host.models import windows
from fathom.runtime.sglang_host.step import slow_fast


def attention(number, window=-1):
    return RadixAttention(4, 16, 0.25, 2, number, sliding_window_size=window)


def runner(model, window=None):
    return SimpleNamespace(model=model, sliding_window_size=window)


@pytest.mark.parametrize(
    ("sizes", "told", "longest"),
    [([-1, -1], None, 0), ([-1, 512, 128], None, 512), ([-1], 4096, 4096), ([None, 0], None, 0)],
)
@pytest.mark.parametrize("beside", [False, True])
def test_a_window_is_known_from_the_layers(sizes, told, longest, beside, monkeypatch):
    serving = SimpleNamespace(enable_streaming_session=False)
    monkeypatch.setattr(slow_fast, "get_serving", lambda: serving)
    layers = {number: attention(number, window) for number, window in enumerate(sizes)}
    model = torch.nn.Module()
    if beside:  # as SGLang has them where Transformers implements the model
        model.attention_instances = layers
    else:
        model.layers = torch.nn.ModuleList(layers.values())
    assert attention_layers.window_of(runner(model, told)) == longest
    config = SimpleNamespace(get_total_num_kv_heads=lambda: 2, hf_text_config=SimpleNamespace())
    given = SimpleNamespace(**vars(runner(model, told)), model_config=config)
    assert attention_layers.windowed(model) == {n for n, each in enumerate(sizes) if each and each > 0}
    reason = slow_fast.why_not(given, object(), True, SimpleNamespace(pp_size=1, tp_size=1))
    assert reason == ""


def test_no_fast_steps_where_no_layer_sees_everything(monkeypatch):
    monkeypatch.setattr(slow_fast, "get_serving", lambda: SimpleNamespace(enable_streaming_session=False))
    model = torch.nn.ModuleList([attention(0, 64), attention(1, 128)])
    assert not attention_layers.has_whole_layer(model)
    assert why_not(model) == "the model has sliding windows in all its layers"


def why_not(model, **text):
    config = SimpleNamespace(get_total_num_kv_heads=lambda: 2, hf_text_config=SimpleNamespace(**text))
    given = SimpleNamespace(model=model, model_config=config, sliding_window_size=None)
    return slow_fast.why_not(given, object(), True, SimpleNamespace(pp_size=1, tp_size=1))


def test_no_fast_steps_where_a_layers_kv_is_read_more_than_once(monkeypatch):
    """Its selection would be of whoever was last. Gemma 3n's layers share KV, a looped model's run again."""
    monkeypatch.setattr(slow_fast, "get_serving", lambda: SimpleNamespace(enable_streaming_session=False))
    apart, shared = (torch.nn.ModuleList([attention(0), attention(n)]) for n in (1, 0))
    assert why_not(apart) == why_not(apart, loop_num=1) == ""
    reason = "the model reads a layer's KV more than once"
    assert why_not(shared) == why_not(apart, loop_num=2) == reason


def test_windows_by_span():
    layers = [attention(0, 64), attention(1), attention(2), attention(3), attention(4, 128), attention(5, 64)]
    found = attention_layers.windows_of(torch.nn.ModuleList(layers), 3, lambda layer: layer // 2)
    assert found == [[64], [], [64, 128]]


@pytest.mark.parametrize(("given", "right"), [(64, 63), (63, 63), (-1, -1)])
def test_a_window_of_one_position_too_many_is_put_right(given, right):
    """Cohere 2's of 64 tokens sees 64 before itself in SGLang; OLMo 3's 63."""
    model = torch.nn.ModuleList([attention(0, given)])
    windows.settle(model, SimpleNamespace(hf_text_config=SimpleNamespace(sliding_window=64)))
    windows.settle(model, SimpleNamespace(hf_text_config=SimpleNamespace(sliding_window=None)))
    assert model[0].sliding_window_size == right


@pytest.mark.parametrize(("changed", "value"), [("use_irope", True), ("xai_temperature_len", 1024)])
def test_attention_that_is_scaled_by_positions_is_refused(changed, value):
    model = torch.nn.ModuleList([attention(0), attention(1)])
    attention_layers.refuse_scaling(model, "Fathom")
    setattr(model[1], changed, value)
    with pytest.raises(NotImplementedError, match="the Fathom attention backend does not scale attention"):
        attention_layers.refuse_scaling(model, "Fathom")


def test_a_model_whose_keys_8_bits_cannot_hold_is_refused():
    """By a checkpoint's scales, and by those of a file, which SGLang notes in another way."""
    model = torch.nn.ModuleList([attention(0), attention(1)])
    method = BaseKVCacheMethod(None)
    attention_layers.refuse_kv_scales(model, 448.0)
    method.create_weights(model[0])
    for scale in (-1.0, 0.02, 1.0):  # -1: the checkpoint has none
        model[0].k_scale.fill_(scale)
        model[0].v_scale.fill_(scale)
        method.process_weights_after_loading(model[0])
        attention_layers.refuse_kv_scales(model, 448.0)
    of_a_file = torch.nn.ModuleList([attention(0), attention(1)])
    of_a_file[1].k_scale = of_a_file[1].v_scale = 1.5
    model[0].v_scale.fill_(1.5)
    method.process_weights_after_loading(model[0])
    for each in (model, of_a_file):
        attention_layers.refuse_kv_scales(each, 57344.0)
        with pytest.raises(
            NotImplementedError, match=r"up to 448, and .* up to 672; use --kv-cache-dtype bf"
        ):
            attention_layers.refuse_kv_scales(each, 448.0)
