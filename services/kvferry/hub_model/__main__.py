"""Fills a folder with a model of the hub, or waits until it is filled.

python -m kvferry.hub_model fill --model OWNER/NAME --revision REVISION --folder FOLDER
python -m kvferry.hub_model wait --model OWNER/NAME --revision REVISION --folder FOLDER [--timeout SECONDS]

HF_TOKEN, HF_ENDPOINT, HTTPS_PROXY and NO_PROXY are read. Exit code 2 where another try is in vain, 1 where it may help.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kvferry.errors import ConfigError, KvferryError, UnavailableError
from kvferry.hub_model.fill import DEFAULT_ENDPOINT, fill
from kvferry.hub_model.marker import why_not_whole

REPORT_S = 15.0
_LOOK_S = 1.0


def wait(
    model: str, revision: str, folder: Path, *, report: Callable[[str], None], timeout_s: float = math.inf
) -> None:
    """Raises ConfigError if the folder holds something else, UnavailableError after `timeout_s`."""
    started_s = time.monotonic()
    reported_s = -math.inf
    while why := why_not_whole(folder, model, revision):
        now_s = time.monotonic()
        if now_s - started_s >= timeout_s:
            raise UnavailableError(f"after {timeout_s:g} s: {why}")
        if now_s - reported_s >= REPORT_S:
            report(f"waiting for {model} at {revision}: {why}")
            reported_s = now_s
        time.sleep(min(_LOOK_S, max(0.01, timeout_s - (now_s - started_s))))
    report(f"{folder} holds {model} at {revision}")


def masked(text: str) -> str:
    # In an address of the hub or of a proxy. To the last @ of the word: a password may contain @ and /.
    return re.sub(r"(?<=://)\S*@", "***@", text)


def _report(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {masked(line)}", flush=True)


def _fault(line: str) -> None:
    print(masked(line), file=sys.stderr)


def _stop(_number: int, _frame: object) -> NoReturn:
    # What is on the drive stays for the next try.
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.hub_model", description="A model of the hub in a folder of a shared volume."
    )
    parser.add_argument("command", choices=["fill", "wait"])
    parser.add_argument("--model", required=True, help="as on the hub: owner/name")
    parser.add_argument("--revision", required=True, help="a commit, a tag or a branch")
    parser.add_argument("--folder", type=Path, required=True, help="what holds the model in the end")
    parser.add_argument("--timeout", type=float, default=math.inf, help="seconds that `wait` waits; default: for ever")
    arguments = parser.parse_args()
    if arguments.folder.name in ("", ".."):
        parser.error(f"--folder {arguments.folder} has no name of its own: give the path of a folder")
    signal.signal(signal.SIGTERM, _stop)
    # Reading the weights of a large model takes minutes, of which it logs every 10 s.
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    logging.getLogger("kvferry").setLevel(logging.INFO)
    try:
        if arguments.command == "wait":
            wait(arguments.model, arguments.revision, arguments.folder, report=_report, timeout_s=arguments.timeout)
        else:
            fill(
                arguments.model,
                arguments.revision,
                arguments.folder,
                report=_report,
                endpoint=os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT,
                token=os.environ.get("HF_TOKEN", "").strip(),
            )
    except ConfigError as error:
        _fault(error.message)
        return 2
    except UnavailableError as error:
        _fault(f"{error.message}; what is there stays for the next try")
        return 1
    except KvferryError as error:
        _fault(error.message)
        return 1
    except OSError as error:
        # A fault of the drive: it is read-only, full, or another user's. Network errors are UnavailableErrors by now.
        where = error.filename or arguments.folder
        _fault(f"{where}: {error.strerror or error} (user {os.geteuid()})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
