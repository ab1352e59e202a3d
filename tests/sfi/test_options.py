"""The operator's numbers: a flag per field, errors with the flag's name."""

import argparse
from dataclasses import fields

import pytest
import torch

from fathom.runtime.decode import Shape
from fathom.runtime.sfi.config import SelectorConfig, SfiConfig
from fathom.runtime.sfi.options import WORDS, SfiOptions, add_arguments, from_arguments


def parse(*flags):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(flags))


def test_without_flags_all_is_default():
    assert parse() == SfiOptions()


@pytest.mark.parametrize("kind", [SfiConfig, SelectorConfig])
def test_every_number_has_its_flag(kind):
    for item in fields(kind):
        low = item.metadata["low"]
        value = item.type(low if low != item.default else low + 1)
        options = parse("--sfi-" + item.name.replace("_", "-"), str(value))
        assert getattr(options.config if kind is SfiConfig else options.selector, item.name) == value
        assert value != item.default


def test_the_help_says_first_what_each_number_is():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    helps = {action.dest: action.help for action in parser._actions}
    assert helps["sfi_recent"] == (
        "last tokens that every fast step reads, its own included; tokens, >= 1 (default: 256; section 5.1)"
    )
    assert set(WORDS) == {item.name for kind in (SfiConfig, SelectorConfig) for item in fields(kind)}
    assert all(helps[f"sfi_{name}"].startswith(f"{words}; ") for name, words in WORDS.items())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sfi-sink", "-1"], "--sfi-sink must be >= 0"),
        (["--sfi-selected", "0"], "--sfi-selected must be >= 1"),
        (["--sfi-recent", "0"], "--sfi-recent must be >= 1"),
        (["--sfi-power", "2"], r"--sfi-power must be in \[0.001, 1\]"),
        (["--sfi-buffer-mib", "0"], "--sfi-buffer-mib must be a finite number > 0, in MiB, got 0"),
        (["--sfi-minimum-gap", "70"], "--sfi-minimum-gap must be at most refresh_budget = 64"),
    ],
)
def test_mistakes_name_the_flag(flags, message):
    with pytest.raises(ValueError, match=message):
        parse(*flags)


def test_the_default_budget_is_bounded_and_holds_one_request():
    def shape(layers, kv_heads, longest):
        return Shape(layers, 1, 32, kv_heads, 128, 128, torch.bfloat16, longest, rows=8)

    small, large = shape(4, 2, 1000), shape(80, 64, 200_000)
    assert small.run(SfiOptions()).tokens == 1000  # no longer than the context
    assert small.buffer_bytes(SfiOptions()) == 16 * small.run(SfiOptions()).bytes
    assert large.run(SfiOptions()).tokens == 2052
    assert large.buffer_bytes(SfiOptions()) == large.run(SfiOptions()).bytes > 1 << 30
    assert large.buffer_bytes(SfiOptions(buffer_mib=2)) == 2 << 20
