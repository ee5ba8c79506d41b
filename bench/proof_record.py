"""The record of proofs in docs/user/models.md, rendered from what proofs between real engines ended with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.proof_models import KINDS
from kvferry.proof.verdict import Distances, Verdict

DOCS = Path(__file__).parents[1] / "docs" / "user"
SEEN, PAGE = DOCS / "proofs.json", DOCS / "models.md"
BEGIN, END = "<!-- rendered from proofs.json -->", "<!-- end -->"


class Row(msgspec.Struct, frozen=True):
    kind: str
    device: str
    vllm: str
    dtype: str
    outcome: str
    reason: str = ""
    distance: float | None = None  # of transferred pages, in natural logarithms; None: nothing was measured
    wrong_from: float | None = None

    @property
    def key(self) -> tuple[int, str, str]:
        return list(KINDS).index(self.kind), self.dtype, self.device


def row_of(kind: str, device: str, vllm: str, dtype: str, verdict: Verdict, measured: Sequence[Distances]) -> Row:
    controls = [control for each in measured for control in each.controls]
    return Row(
        kind,
        device,
        vllm,
        dtype,
        verdict.outcome.value,
        verdict.reason,
        max((each.transferred for each in measured), default=None),
        min(controls, default=None),
    )


def read() -> list[Row]:
    return msgspec.json.decode(SEEN.read_bytes(), type=list[Row])


def record(rows: Sequence[Row]) -> None:
    """Write both files. A row replaces that of the same kind, type and device; types that are not tried any more go."""
    known = {row.key: row for row in (*read(), *rows) if row.dtype == KINDS[row.kind].dtype}
    ordered = [known[key] for key in sorted(known)]
    SEEN.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    PAGE.write_text(with_record(PAGE.read_text(encoding="utf-8"), ordered), encoding="utf-8")


def with_record(page: str, rows: Sequence[Row]) -> str:
    """Return the page with its record rendered anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [
        "| kind of model | computed in | device, vLLM | result | distance | wrong pages from |",
        "|---" * 6 + "|",
        *(
            f"| {KINDS[row.kind].title} | {row.dtype} | {row.device}, {row.vllm} | {_result(row)} "
            f"| {_figure(row.distance)} | {_figure(row.wrong_from)} |"
            for row in rows
        ),
    ]
    return f"{before}{BEGIN}\n{chr(10).join(lines)}\n{END}{after}"


def _result(row: Row) -> str:
    return f"{row.outcome}: {row.reason}" if row.reason else row.outcome


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
