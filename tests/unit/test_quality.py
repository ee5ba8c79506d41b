"""Statistics, verdicts, obstacles, samples, result files and the command of `kvferry quality`, without an engine."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from kvferry import config as configuration
from kvferry.cli import main
from kvferry.engine.quality_report import (
    MAX_FILE_BYTES,
    Interval,
    QualityReport,
    Verdict,
    judge,
    read_report,
    why_untested,
)
from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_json import from_config
from kvferry_plan.quality.obstacles import Hardware, find_obstacles
from kvferry_plan.quality.report_file import write_report
from kvferry_plan.quality.samples import MAX_DATASET_BYTES, SHIPPED, load_dataset, sample_text, task_prompts
from kvferry_plan.quality.verdict import (
    SampleScores,
    by_length,
    exact_match,
    interval_of_mean,
    interval_of_share,
    worst,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "hidden_size": 256, "vocab_size": 1000, "max_position_embeddings": 4096,
}  # fmt: skip
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
CPU = Hardware("cpu", "a CPU", has_avx512=True)


def length(**changes: Any) -> dict[str, Any]:
    values = {
        "num_tokens": 1024, "num_samples": 4, "num_positions": 64,
        "divergence_nats": {"mean": 0.001, "low": 0.0, "high": 0.002}, "baseline_perplexity": 9.0,
        "perplexity_ratio": {"mean": 1.001, "low": 0.9, "high": 1.1}, "agreement": 0.99, "verdict": "pass",
    }  # fmt: skip
    return values | changes


def report(**changes: Any) -> QualityReport:
    interval = {"mean": 0.001, "low": 0.0, "high": 0.002}
    values = {
        "format": 1, "verdict": "pass", "budget": 0.005, "mode": "engine", "kv_cache_dtype": "fp8_e4m3",
        "compute_dtype": "float32", "baseline_kv_cache_dtype": "float32", "baseline_compute_dtype": "float32",
        "model": "m", "weights": "w", "revision": "r", "vllm": "0.32.0", "device": "cpu", "hardware": "a CPU",
        "lengths": [length()], "exact_match": interval, "num_tasks": 4, "dataset": SHIPPED, "dataset_digest": "d",
        "warnings": [], "date": "2026-11-25", "took_s": 1.0,
    }  # fmt: skip
    return msgspec.convert(values | changes, QualityReport)


class TestStatistics:
    def test_the_interval_of_a_mean_is_students(self) -> None:
        # 1 to 5: mean 3, standard deviation sqrt(2.5), t(4) = 2.7764.
        mean, low, high = interval_of_mean([1, 2, 3, 4, 5])
        assert (mean, round(low, 4), round(high, 4)) == (3, 1.0368, 4.9632)

    def test_it_holds_the_mean_as_often_as_it_says(self) -> None:
        numbers = random.Random(1)
        for size in (3, 8, 40):
            intervals = (interval_of_mean([numbers.gauss(5, 2) for _ in range(size)]) for _ in range(4000))
            share = sum(low <= 5 <= high for _, low, high in intervals) / 4000
            assert share == pytest.approx(0.95, abs=0.012), size

    def test_one_value_decides_nothing_and_an_endless_one_everything(self) -> None:
        assert interval_of_mean([1.0]) == (1.0, -math.inf, math.inf)
        assert interval_of_mean([1.0, math.nan]) == (math.inf, math.inf, math.inf)
        with pytest.raises(ValueError, match="no values"):
            interval_of_mean([])

    def test_the_interval_of_a_share_is_wilsons(self) -> None:
        share, low, high = interval_of_share(8, 10)
        assert (share, round(low, 4), round(high, 4)) == (0.8, 0.4902, 0.9433)
        assert interval_of_share(0, 5).low == pytest.approx(0, abs=1e-12)
        assert interval_of_share(5, 5).high == pytest.approx(1)
        with pytest.raises(ValueError, match="6 hits of 5"):
            interval_of_share(6, 5)


class TestVerdict:
    def test_an_interval_with_the_budget_in_it_decides_nothing(self) -> None:
        limit = math.log(1.005)
        assert judge(Interval(0, -limit, limit), 0.005) is Verdict.PASS
        assert judge(Interval(0, 0, limit * 1.01), 0.005) is Verdict.UNDECIDED
        assert judge(Interval(1, limit * 1.01, 2), 0.005) is Verdict.FAIL
        assert judge(interval_of_mean([math.nan, 1]), 0.005) is Verdict.FAIL

    def test_the_worst_length_counts(self) -> None:
        assert worst([Verdict.PASS, Verdict.UNDECIDED]) is Verdict.UNDECIDED
        assert worst([Verdict.PASS, Verdict.FAIL, Verdict.UNDECIDED]) is Verdict.FAIL
        with pytest.raises(ValueError, match="no verdicts"):
            worst([])

    @pytest.mark.parametrize(
        ("divergences", "losses", "verdict"),
        [
            ([0.001, 0.0011, 0.0012], [2.001, 2.3, 1.9], "pass"),  # a noisy text does not hide a small divergence
            ([0.001, 0.004, 0.009], [2.0, 2.0, 2.0], "undecided"),
            ([0.02, 0.021, 0.022], [2.0, 2.0, 2.0], "fail"),
            ([0.001, 0.0011, 0.0012], [2.2, 2.21, 2.19], "fail"),  # worse on the text, beyond noise
        ],
    )  # fmt: skip
    def test_divergence_decides_and_a_proven_loss_fails(
        self, divergences: Sequence[float], losses: Sequence[float], verdict: str
    ) -> None:
        scores = [SampleScores(1024, kl, 2.0, loss, 60, 64) for kl, loss in zip(divergences, losses, strict=True)]
        (result,) = by_length(scores, 0.005)
        assert result.verdict == verdict
        assert result.agreement == 60 / 64
        assert result.perplexity_ratio.mean == pytest.approx(math.exp(sum(losses) / 3 - 2))

    def test_lengths_are_kept_apart(self) -> None:
        scores = [SampleScores(length, 0.0, 1.0, 1.0, 8, 8) for length in (2048, 1024, 2048)]
        assert [(each.num_tokens, each.num_samples) for each in by_length(scores, 0.005)] == [(1024, 1), (2048, 2)]

    def test_answers_match_token_for_token(self) -> None:
        assert exact_match([[1, 2], [3]], [[1, 2], [4]]).mean == 0.5


class TestScores:
    def test_divergence_loss_and_agreement_are_of_the_distributions(self) -> None:
        numpy = pytest.importorskip("numpy")
        from kvferry_plan.quality.measure import score

        baseline = numpy.log(numpy.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]], dtype=numpy.float32))
        other = numpy.log(numpy.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], dtype=numpy.float32))
        scores = score(baseline, other, [0, 0], 7)
        assert scores.divergence == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2, rel=1e-5)
        assert scores.loss - scores.baseline_loss == pytest.approx(math.log(2) / 2, rel=1e-5)
        assert (scores.num_agreeing, scores.num_positions, scores.num_tokens) == (1, 2, 7)
        assert score(baseline, baseline, [0, 0], 7).divergence == 0

    def test_tokens_without_probability_add_nothing(self) -> None:
        numpy = pytest.importorskip("numpy")
        from kvferry_plan.quality.measure import score

        baseline = numpy.array([[0.0, -numpy.inf]], dtype=numpy.float32)
        assert score(baseline, baseline, [0], 1).divergence == 0
        assert score(baseline, numpy.array([[numpy.nan, 0]], dtype=numpy.float32), [0], 1).divergence != 0


class TestObstacles:
    @pytest.mark.parametrize(
        ("change", "dtype", "hardware", "message"),
        [
            ({"quantization_config": {"quant_method": "fp8"}}, "fp8_e5m2", CPU, "with an FP8 checkpoint"),
            ({"quantization_config": {"quant_method": "modelopt"}}, "fp8_e5m2", CPU, "FP8 checkpoint"),
            ({"quantization_config": COMPRESSED | {"kv_cache_scheme": {}}}, "fp8_e5m2", CPU, "FP8 checkpoint"),
            ({"quantization_config": {"quant_method": "quark"}}, "fp8_e5m2", CPU, "FP8 checkpoint"),
            ({}, "int8", CPU, "attention on CPUs has no pages of type int8_per_token_head; it has float32"),
            ({}, "nvfp4", CPU, "no pages of type nvfp4"),
            ({}, "fp8", Hardware("cpu", "an old CPU"), "need AVX-512 or AMX, which an old CPU lacks"),
            ({"head_dim": 80}, "fp8", CPU, "head sizes that 32 divides on CPUs, not 80"),
            ({}, "fp8_ds_mla", CPU, "hold latents"),
            ({}, "nvfp4_4over6", Hardware("gpu", "H100", capability=90), "need compute capability 10; H100 has 9"),
        ],
    )  # fmt: skip
    def test_they_are_named_before_anything_runs(
        self, change: dict[str, Any], dtype: str, hardware: Hardware, message: str
    ) -> None:
        refusals = find_obstacles(LLAMA | change, dtype, hardware).refusals
        assert any(message in refusal for refusal in refusals), refusals

    @pytest.mark.parametrize("method", [{"quant_method": "fbgemm_fp8"}, {"quant_method": "gptq", "bits": 8}, None])
    def test_vllm_takes_e5m2_where_the_checkpoint_has_no_scales_of_pages(self, method: dict[str, Any] | None) -> None:
        config = LLAMA | {"quantization_config": COMPRESSED if method is None else method}
        assert find_obstacles(config, "fp8_e5m2", CPU).refusals == ()

    def test_pages_of_32_bits_cannot_be_had_of_a_checkpoint_that_declares_others(self) -> None:
        """vLLM's `auto` is what the checkpoint declares, and it has no option for float32."""
        config = LLAMA | {"quantization_config": COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}}
        (refusal,) = find_obstacles(config, "float32", CPU).refusals
        assert refusal == "the checkpoint declares pages of type fp8_e4m3; vLLM has no option for float32 beside it"
        assert find_obstacles(config, "bfloat16", CPU).refusals == ()

    @pytest.mark.parametrize(
        ("declared", "name", "types"),
        [
            ("", "auto", ("auto", "float32")),
            ("", "bf16", ("auto", "bfloat16")),
            ("", "fp8", ("fp8_e4m3", "float32")),
            ("fp8_e4m3", "bf16", ("bfloat16", "bfloat16")),
            ("fp8_e4m3", "fp16", ("float16", "float16")),
        ],
    )
    def test_the_option_for_pages_never_means_what_the_checkpoint_declares(
        self, declared: str, name: str, types: tuple[str, str]
    ) -> None:
        measuring = pytest.importorskip("kvferry_plan.quality.measure")
        geometry = dataclasses.replace(from_config(LLAMA), checkpoint_kv_dtype=declared)
        assert measuring.types_of(configuration.load(flags=[]), geometry, name) == types

    def test_uncalibrated_scales_are_a_warning(self) -> None:
        found = find_obstacles(LLAMA, "fp8", CPU)
        assert found.refusals == ()
        assert "beyond 448 are cut" in found.warnings[0]
        calibrated = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}}
        assert find_obstacles(LLAMA | calibrated, "fp8", CPU).warnings == ()
        assert find_obstacles(LLAMA, "bf16", CPU).warnings == ()


class TestSamples:
    def test_the_shipped_text_never_repeats_between_samples(self) -> None:
        dataset = load_dataset(None)
        texts = [list(itertools.islice(sample_text(dataset, number, 4), 200)) for number in range(4)]
        assert len({text[0] for text in texts}) == 4
        records = [paragraph for text in texts for paragraph in text if paragraph.startswith("Order ")]
        assert len(set(records)) == len(records) == 400

    def test_it_is_the_same_every_time(self) -> None:
        dataset = load_dataset(None)
        assert [*itertools.islice(sample_text(dataset, 1, 4), 9)] == [*itertools.islice(sample_text(dataset, 1, 4), 9)]
        assert task_prompts(3) == task_prompts(3)

    def test_a_file_is_taken_as_it_is(self, tmp_path: Path) -> None:
        file = tmp_path / "text.txt"
        file.write_text("One\nline.\n\n\nTwo.\n\nThree.", encoding="utf-8")
        dataset = load_dataset(file)
        assert dataset.paragraphs == ("One line.", "Two.", "Three.")
        assert [*itertools.islice(sample_text(dataset, 1, 3), 4)] == ["Two.", "Three.", "One line.", "Two."]

    @pytest.mark.parametrize(
        "content",
        [b"One\r\nline.\r\n\r\nTwo.\r\n", b"One\nline.\n \t\nTwo.\n", b"\xef\xbb\xbfOne\nline.\n\nTwo."],
    )
    def test_lines_may_end_as_on_windows_and_empty_ones_may_hold_blanks(self, content: bytes, tmp_path: Path) -> None:
        file = tmp_path / "text.txt"
        file.write_bytes(content)
        assert load_dataset(file).paragraphs == ("One line.", "Two.")

    def test_a_file_is_not_the_shipped_text_by_its_name(self, tmp_path: Path) -> None:
        file = tmp_path / SHIPPED
        file.write_text("One.\n\nTwo.", encoding="utf-8")
        assert [*itertools.islice(sample_text(load_dataset(file), 0, 2), 3)] == ["One.", "Two.", "One."]

    def test_unusable_files_are_named(self, tmp_path: Path) -> None:
        file = tmp_path / "text.txt"
        for content, message in [
            (b"\xff\xfe", "no UTF-8 text: invalid start byte at byte 0"),
            (b"one", "has 1 paragraphs; at least 2"),
            (b" " * (MAX_DATASET_BYTES + 1), f"more than {MAX_DATASET_BYTES} bytes"),
        ]:
            file.write_bytes(content)
            with pytest.raises(ConfigError, match=message):
                load_dataset(file)
        with pytest.raises(ConfigError, match="No such file"):
            load_dataset(tmp_path / "none")


class TestReport:
    ASKED = {  # noqa: RUF012
        "weights": "w", "revision": "r", "kv_cache_dtype": "fp8_e4m3", "compute_dtype": "float32", "vllm": "0.32.0",
        "device": "cpu",
    }  # fmt: skip
    CONTEXT = 1040  # 1,024 tokens, and 16 scored ones of each sample

    def test_a_file_comes_back(self, tmp_path: Path) -> None:
        write_report(report(), tmp_path / "report.json")
        assert read_report(tmp_path / "report.json") == report()
        assert self.reason(report()) == ""

    def reason(self, shown: QualityReport, *, max_model_len: int = CONTEXT, **changes: str) -> str:
        return why_untested(shown, max_model_len=max_model_len, **self.ASKED | changes)

    def test_a_file_is_whole_or_as_it_was(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "report.json"
        write_report(report(), file)

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(ConfigError, match=r"report\.json cannot be written: No space left"):
            write_report(report(verdict="fail"), file)
        assert read_report(file) == report()
        assert [each.name for each in tmp_path.iterdir()] == ["report.json"]

    def test_a_link_and_a_pipe_are_written_through(self, tmp_path: Path) -> None:
        (tmp_path / "link.json").symlink_to(tmp_path / "report.json")
        write_report(report(), tmp_path / "link.json")
        assert (tmp_path / "link.json").is_symlink()
        assert read_report(tmp_path / "report.json") == report()
        write_report(report(), Path("/dev/null"))
        with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left"):
            write_report(report(), Path("/dev/full"))

    @pytest.mark.parametrize("name", ASKED)
    def test_every_difference_is_named(self, name: str) -> None:
        reason = self.reason(report(), **{name: "other"})
        assert reason == f"it is of {name} {self.ASKED[name]!r}; 'other' is configured"

    def test_only_a_pass_on_the_engine_counts(self) -> None:
        assert "verdict is 'undecided' against a budget of 0.50%" in self.reason(report(verdict="undecided"))
        assert "its mode is 'emulated'; 'engine' is needed" in self.reason(report(mode="emulated"))
        assert "not every context length" in self.reason(report(lengths=[]))

    def test_a_baseline_of_quantized_pages_shows_nothing(self) -> None:
        """Types against themselves diverge by nothing."""
        reason = self.reason(report(baseline_kv_cache_dtype="fp8_e4m3"))
        assert reason == "its baseline has pages of type 'fp8_e4m3'; float32, bfloat16 or float16 is needed"

    @pytest.mark.parametrize(
        "changes",
        [
            {"divergence_nats": {"mean": 5.0, "low": 4.0, "high": 6.0}},
            {"divergence_nats": {"mean": 0.004, "low": 0.003, "high": 0.005}},  # log 1.005 is 0.004988
            {"divergence_nats": {"mean": None, "low": None, "high": None}},
            {"perplexity_ratio": {"mean": 1.2, "low": 1.1, "high": 1.3}},
            {"perplexity_ratio": {"mean": None, "low": None, "high": None}},
            {"verdict": "undecided"},
        ],
    )
    def test_the_numbers_of_each_length_have_to_pass(self, changes: dict[str, Any]) -> None:
        spoilt = report(lengths=[length(), length(num_tokens=64, **changes)])
        assert self.reason(spoilt) == "not every context length in it passes"

    def test_the_numbers_of_a_length_that_passes_may_be_endless_where_it_passes(self) -> None:
        ratio = {"mean": 1.0, "low": 0.0, "high": None}
        assert self.reason(report(lengths=[length(perplexity_ratio=ratio)])) == ""

    def test_contexts_beyond_the_longest_measured_one_are_not_shown(self) -> None:
        assert self.reason(report(), max_model_len=self.CONTEXT + 1) == (
            "its longest context has 1,040 tokens; the engine's has 1,041 (model.max_model_len)"
        )
        assert self.reason(report(lengths=[length(), length(num_tokens=4080)]), max_model_len=4096) == ""

    def test_a_named_pipe_is_refused_and_not_waited_for(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "report.json")
        with pytest.raises(ConfigError, match="no regular file"):
            read_report(tmp_path / "report.json")

    @pytest.mark.parametrize(
        "changes",
        [
            {"budget": 0.0},
            {"budget": 1e9},
            {"lengths": [length(num_samples=0)]},
            {"lengths": [length(num_positions=-4)]},
            {"lengths": [length(num_tokens=0)]},
            {"lengths": [length(agreement=7.0)]},
        ],
    )
    def test_numbers_that_no_measurement_has_are_refused(self, changes: dict[str, Any], tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        file.write_bytes(msgspec.json.encode(msgspec.to_builtins(report()) | changes))
        with pytest.raises(ConfigError, match="no report of `kvferry quality`"):
            read_report(file)

    def test_unusable_files_are_named(self, tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        for content, message in [
            (b"{}", "no report of `kvferry quality`"),
            (b"[" * 100_000, "no report"),
            (msgspec.json.encode(report(format=2)), "has format 2; 1 is expected"),
            (b" " * (MAX_FILE_BYTES + 1), f"more than {MAX_FILE_BYTES} bytes"),
        ]:
            file.write_bytes(content)
            with pytest.raises(ConfigError, match=message):
                read_report(file)
        with pytest.raises(ConfigError, match="No such file"):
            read_report(tmp_path / "none")

    def test_a_relative_path_is_refused(self) -> None:
        from kvferry import config

        with pytest.raises(ConfigError, match=r"engine\.quality_report.*absolute path"):
            config.load(flags=["engine.quality_report=report.json"])


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--kv-cache-dtype", "fp8", "--lengths", "x"], "--lengths: 'x'; expected numbers of tokens"),
            (["--kv-cache-dtype", "fp8", "--lengths", "0"], "--lengths: 0; at least 1 token"),
            (["--kv-cache-dtype", "fp8", "--lengths", "1," * 17], "17 lengths; at most 16"),
            (["--kv-cache-dtype", "fp8", "--set", "engine.kind=sim"], "simulated engines compute nothing"),
            (["--kv-cache-dtype", "fp8", "--kv-cache-dtype", "bf16", "--output", "x"], "{dtype} is needed in the name"),
            (["--kv-cache-dtype", "fp8", "--dataset", "/no/such/file"], "--dataset: /no/such/file cannot be read"),
            (["--kv-cache-dtype", "fp8", "--budget", "nan"], "--budget nan: expected a number"),
            (["--kv-cache-dtype", "fp8", "--timeout", "inf"], "--timeout inf: expected a number"),
            (
                ["--kv-cache-dtype", "fp8", "--output", "/no/such/folder/x.json"],
                "/no/such/folder/x.json cannot be written",
            ),
            (["--kv-cache-dtype", "fp8", "--output", "/"], "/ cannot be written: Is a directory"),
        ],
    )
    def test_bad_input_is_refused_by_name(self, arguments: list[str], message: str) -> None:
        result = CliRunner().invoke(main, ["quality", *arguments])
        assert result.exit_code == 2
        assert message in result.output

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    def test_a_signal_ends_the_engine_and_the_command(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """SIGTERM alone would leave vLLM's processes, which have a session of their own."""
        measuring = pytest.importorskip("kvferry_plan.quality.measure")
        ended = []

        def measure(*_: Any) -> Iterator[QualityReport]:
            try:
                os.kill(os.getpid(), number)
                time.sleep(30)
            finally:
                ended.append(number)
            yield report()

        monkeypatch.setattr(measuring, "measure", measure)
        # A process in the background of a shell ignores some of them, and so would the command.
        before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        of_tests = signal.signal(number, before)
        try:
            result = CliRunner().invoke(main, ["quality", "--kv-cache-dtype", "fp8"])
            assert (result.exit_code, ended) == (130, [number])
            assert "interrupted; nothing is left running" in result.output
            assert signal.getsignal(number) == before
        finally:
            signal.signal(number, of_tests)

    def test_a_result_is_shown_before_it_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A full disk does not cost what took hours to measure."""
        measuring = pytest.importorskip("kvferry_plan.quality.measure")
        monkeypatch.setattr(measuring, "measure", lambda *_: iter([report()]))
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(
            "kvferry_plan.quality.command.write_report", lambda *_: write_report(report(), Path("/dev/full"))
        )
        result = CliRunner().invoke(main, ["quality", "--kv-cache-dtype", "fp8"])
        assert result.exit_code == 2
        assert "verdict: pass" in result.output
        assert "/dev/full cannot be written" in result.output

    def test_a_folder_that_cannot_be_used_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measuring = pytest.importorskip("kvferry_plan.quality.measure")

        def measure(*_: Any) -> Iterator[QualityReport]:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/no/such/folder")
            yield report()

        monkeypatch.setattr(measuring, "measure", measure)
        result = CliRunner().invoke(main, ["quality", "--kv-cache-dtype", "fp8"])
        assert (result.exit_code, "/no/such/folder: No such file or directory" in result.output) == (2, True)
