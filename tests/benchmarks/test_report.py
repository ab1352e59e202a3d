"""What a report says of the machine."""

import pytest

from fathom.benchmarks import report

TWO_CORES = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
flags\t\t: fpu vme

processor\t: 1
cpu family\t: 26
model\t\t: 2
model name\t: AMD EPYC
"""


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (TWO_CORES, "AMD EPYC, family 26, model 2"),
        ("processor\t: 0\nmodel name\t: AMD EPYC\n", "AMD EPYC"),
    ],
)
def test_generations_of_one_name_are_told_apart(tmp_path, text, name):
    (tmp_path / "cpuinfo").write_text(text)
    assert report.cpu_model(tmp_path / "cpuinfo") == name


def test_a_machine_without_such_a_file_has_a_name(tmp_path):
    assert isinstance(report.cpu_model(tmp_path / "none"), str)
