"""Random servers and random requests to them, held against the oracles of tests/oracles: ``make fuzz``."""

import argparse
import contextlib
import itertools
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import conftest
import torch
import transformers
from forked import Template
from fuzz import trial, worlds
from fuzz.reference import Reference
from fuzz.report import Report

FAILURES = Path(".bench") / "fuzz"


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        prog="make fuzz", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--seed", type=int, default=1, help="of the first world; the next ones count on")
    options.add_argument("--minutes", type=float, default=10.0, help="after which no further world begins")
    options.add_argument(
        "--worlds", type=int, help="how many servers, however long they take; without it, --minutes decides"
    )
    options.add_argument("--waves", type=int, default=trial.WAVES, help="of requests to each server")
    options.add_argument(
        "--devices", type=int, choices=(1, 2), help="that share each model; without it one, now and then two"
    )
    options.add_argument("--out", type=Path, default=FAILURES, help="folder for what fails")
    return options


def run_world(seed: int, asked: argparse.Namespace, template: Template, report: Report) -> None:
    """Start the server of a seed, ask it, and stop it."""
    world, before = worlds.draw(seed, asked.devices), report.counts.copy()
    with tempfile.TemporaryDirectory() as name, conftest.starter(Path(name)) as run:
        try:
            reference = Reference(world, Path(name) / "models")
            server = trial.start(run, template, world, reference)
            trial.Trial(world, reference, server, report).run(asked.waves)
        except Exception as error:
            report.failed(world, f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    print(report.world_line(world, before), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where anything failed."""
    asked = parser().parse_args(arguments)
    options = "" if asked.waves == trial.WAVES else f" --waves {asked.waves}"
    options += "" if asked.devices is None else f" --devices {asked.devices}"
    report, end = Report(asked.out, options), time.monotonic() + 60 * asked.minutes
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    seeds = (
        itertools.count(asked.seed) if asked.worlds is None else range(asked.seed, asked.seed + asked.worlds)
    )
    with (
        contextlib.suppress(KeyboardInterrupt),
        tempfile.TemporaryDirectory() as name,
        Template(Path(name), {**os.environ, "OMP_NUM_THREADS": "1"}) as template,
    ):
        for seed in seeds:
            run_world(seed, asked, template, report)
            if asked.worlds is None and time.monotonic() > end:
                break
    print(report.totals())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
