"""Tokenizers with tokens that their models have not: an engine ends at an index that is out of range."""

from types import SimpleNamespace

import pytest

from fathom.runtime.sglang_host.machine import torchvision_ops

torchvision_ops.declare()

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput  # noqa: E402

from fathom.server import tokenizer_manager as ours  # noqa: E402

VOCABULARY = 1000


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(ours.TokenizerManager, "_validate_one_request", lambda *_: None)
    manager = ours.FathomTokenizerManager.__new__(ours.FathomTokenizerManager)
    manager.allow_auto_truncate, manager.is_generation, manager.preferred_sampling_params = False, True, None
    manager.model_config = SimpleNamespace(vocab_size=VOCABULARY, hf_eos_token_id={7})
    manager.tokenizer = SimpleNamespace(eos_token_id=VOCABULARY - 1, additional_stop_token_ids={9})
    return manager


@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
def test_a_text_of_such_tokens_is_refused(manager, kind):
    manager._validate_one_request(kind(text="a", sampling_params={}), [7, VOCABULARY - 1])
    with pytest.raises(ValueError, match=f"the tokenizer made {VOCABULARY}"):
        manager._validate_one_request(kind(text="a", sampling_params={}), [7, VOCABULARY])


@pytest.mark.parametrize("where", ["eos_token_id", "additional_stop_token_ids", "hf_eos_token_id"])
def test_no_minimal_length_holds_such_a_token_off(manager, where):
    def check(**sampling):
        manager._validate_one_request(GenerateReqInput(text="a", sampling_params=sampling), [7])

    check(min_new_tokens=1)
    owner = manager.model_config if where.startswith("hf") else manager.tokenizer
    setattr(owner, where, VOCABULARY if where == "eos_token_id" else {VOCABULARY})
    check()
    check(min_new_tokens=0)
    with pytest.raises(ValueError, match=f"its token {VOCABULARY} ends answers"):
        check(min_new_tokens=1)
    manager.preferred_sampling_params = {"min_new_tokens": 1}
    check(min_new_tokens=0)
    with pytest.raises(ValueError, match=f"its token {VOCABULARY} ends answers"):
        check()
