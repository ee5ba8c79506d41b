"""Test on this machine's GPUs what is tested on CPUs, and write one report (docs/operator/gpu.md).

    make gpu-check                                  set up an environment for CUDA, run all parts: 90 minutes at most
    make gpu-check ARGS="--only exact --only tiers" some of them
    make gpu-check ARGS=--list                      their names
    make gpu-check ARGS=--dry-run                   each part's dry run, on any machine

Exit code 0 if parts passed and none failed, 1 if one failed, 2 for wrong arguments, 3 without a GPU, 4 if all were
skipped.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bench.gpu_check.gpus import NoGpu, gpus_here
from bench.gpu_check.parts import PARTS, TOTAL_LIMIT_S, Part, why_skipped

OUT = Path("loadtest-results/gpu-check")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def _stop(number: int, frame: object) -> NoReturn:
    """As Ctrl-C: the part that runs is ended with all that it started."""
    for each in _SIGNALS:
        # A second one would end what ends the part, and leave its processes behind.
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _dry_run(parts: list[Part]) -> int:
    from bench.gpu_check.dry_run import faults_of

    faults = []
    with tempfile.TemporaryDirectory(prefix="kvferry-gpu-check-") as folder:
        for part in parts:
            found = faults_of(part, Path(folder))
            _say(f"{part.name}: {'; '.join(found) or 'could run'}")
            faults += found
    print(f"{len(parts)} parts, {len(faults)} faults")
    return 1 if faults else 0


def _run(parts: list[Part], out: Path, limit_s: float) -> int:
    from bench.gpu_check import report
    from bench.gpu_check.runner import Outcome, run_all

    gpus = gpus_here()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"gpu-check: --out: {error}", file=sys.stderr)
        return 2
    where = report.machine(gpus)
    missing = [program for part in parts for program in part.programs if shutil.which(program) is None]
    not_run = [part.name for part in PARTS if part not in parts]
    outcomes: list[Outcome] = []
    is_written = True

    def keep(seen: list[Outcome]) -> None:
        # After each part: a machine that goes away leaves what was seen.
        nonlocal is_written
        outcomes[:], is_written = seen, True
        try:
            report.write(out, seen, where, [*not_run, *(part.name for part in parts[len(seen) :])])
        except OSError as error:
            is_written = False
            _say(f"the report cannot be written: {error}")

    try:
        run_all(
            parts,
            out,
            lambda part: why_skipped(part, [gpu.capability for gpu in gpus], [gpu.memory_mib for gpu in gpus], missing),
            limit_s=limit_s,
            say=_say,
            on_outcome=lambda seen: keep(list(seen)),
        )
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    finally:
        if outcomes and is_written:
            _say(f"report: {out / 'report.md'}, {out / 'report.json'}")
    seen = {outcome.status for outcome in outcomes}
    if seen & {"failed", "timed out"} or not is_written:
        return 1
    if "passed" not in seen:
        _say("every part was skipped: nothing was tested")
        return 4
    return 0


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Exits with 2 where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="make gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="PART", help="run this part")
    parser.add_argument("--list", action="store_true", help="show the parts and what each shows")
    parser.add_argument("--dry-run", action="store_true", help="try what needs no device")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the report and logs (default: %(default)s)")
    parser.add_argument(
        "--limit", type=float, default=TOTAL_LIMIT_S, metavar="S", help="seconds of all parts (default: %(default)s)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = read_arguments(arguments)
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    if options.list:
        for part in parts:
            print(f"{part.name:18} {part.limit_s:4} s  {part.num_gpus} GPU  {part.proves}")
        return 0
    if options.dry_run:
        return _dry_run(parts)
    for number in _SIGNALS:
        signal.signal(number, _stop)
    try:
        return _run(parts, options.out.absolute(), options.limit)
    except NoGpu as error:
        print(f"gpu-check: no GPU here: {error}. `make gpu-check ARGS=--dry-run` needs none", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
