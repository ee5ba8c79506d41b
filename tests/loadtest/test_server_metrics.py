"""Figures that servers tell of themselves, in each of their dialects."""

from __future__ import annotations

import asyncio

import pytest

from kvferry_loadtest import server_metrics
from kvferry_loadtest.http_client import Endpoint, HttpClient
from kvferry_loadtest.server_metrics import DIALECTS, Sample, Sampler, read_text, server_of, summed
from support.load_records import record

VLLM = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 40.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 20.0
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
python_gc_objects_collected_total{generation="0"} 12345.0
"""

KVFERRY = """\
kvferry_worker_prompt_tokens_total{worker="p",role="prefill",source="local_compute"} 10.0
kvferry_worker_prompt_tokens_total{worker="d",role="decode",source="external_kv_transfer"} 9.0
kvferry_worker_requests_waiting{worker="p",role="prefill"} 1.0
kvferry_worker_requests_waiting{worker="d",role="decode"} 2.0
kvferry_worker_kv_pages_used{worker="p",role="prefill"} 5.0
kvferry_worker_kv_pages{worker="p",role="prefill"} 100.0
kvferry_worker_kv_pages_used{worker="d",role="decode"} 25.0
kvferry_worker_kv_pages{worker="d",role="decode"} 100.0
kvferry_worker_ferried_bytes_total{worker="d",role="decode"} 4096.0
"""


def test_vllm() -> None:
    sample = read_text(VLLM)
    assert sample.dialect == "vllm"
    assert sample.prompt_by_source == {"local_compute": 120.0, "local_cache_hit": 40.0}
    assert (sample.preemptions, sample.waiting, sample.kv_used_share) == (2.0, 3.0, 0.25)


def test_vllm_behind_ray() -> None:
    sample = read_text(VLLM.replace("vllm:", "ray_vllm_"))
    assert sample.dialect == "vllm on ray"
    assert sample.prompt_by_source["local_compute"] == 120.0


def test_kvferry() -> None:
    sample = read_text(KVFERRY)
    assert sample.dialect == "kvferry"
    assert sample.prompt_by_source == {"local_compute": 10.0, "external_kv_transfer": 9.0}
    assert (sample.waiting, sample.kv_used_share) == (3.0, 0.15)
    assert sample.preemptions is None  # it does not say
    assert sample.bytes_by_tier == {"ferried": 4096.0}


def test_a_server_that_says_nothing_known() -> None:
    assert read_text("http_requests_total 5\n").dialect == ""
    assert read_text("").dialect == ""


def test_dialects_share_no_names() -> None:
    names = [name for dialect in DIALECTS for name in dialect.samples]
    assert len(names) == len(set(names))


def test_several_servers_are_added() -> None:
    total = summed([read_text(VLLM), read_text(VLLM.replace("0.25", "0.75"))], 7.0)
    assert total.prompt_by_source == {"local_compute": 240.0, "local_cache_hit": 80.0}
    assert (total.t_s, total.waiting, total.preemptions, total.kv_used_share) == (7.0, 6.0, 4.0, 0.5)


def test_figures_are_what_was_added_during_the_run() -> None:
    before = read_text(VLLM)
    after = read_text(VLLM.replace("100.0", "160.0").replace("40.0", "80.0").replace("2.0\n", "5.0\n"))
    server = server_of(before, after, [], [record(), record()])
    assert server.computed_tokens == 60
    assert server.cached_tokens_by_source == {"local_cache_hit": 40.0}
    assert server.prompt_tokens == 200  # by the clients' count
    assert server.recompute_share == 60 / 200
    assert server.kv_utilisation_mean is None  # no sample during the run
    assert server_of(None, after, [], []).dialect == ""


def test_ttft_that_follows_the_queue_correlates_with_it() -> None:
    samples = [Sample(t_s=float(i), waiting=float(i % 5)) for i in range(20)]
    follows = [record(i + 0.5, ttft_s=0.1 + 0.2 * (i % 5)) for i in range(20)]
    first, last = read_text(VLLM), read_text(VLLM)
    assert server_of(first, last, samples, follows).ttft_queue_correlation == pytest.approx(1.0)
    against = [record(i + 0.5, ttft_s=2.0 - 0.2 * (i % 5)) for i in range(20)]
    assert server_of(first, last, samples, against).ttft_queue_correlation == pytest.approx(-1.0)
    constant = [record(i + 0.5) for i in range(20)]
    assert server_of(first, last, samples, constant[:2]).ttft_queue_correlation is None


async def test_a_server_that_does_not_answer_leaves_a_sample_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "SETTLE_S", 0.0)  # what this server tells is never old

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(VLLM), VLLM.encode()))
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
    client, nobody = HttpClient(Endpoint(url)), HttpClient(Endpoint("http://127.0.0.1:1/metrics"))
    try:
        alone = Sampler([client], {}, lambda: 0.0)
        await alone.begin()
        await alone.end()
        assert alone.first is not None
        assert alone.first.waiting == 3.0
        with_nobody = Sampler([client, nobody], {}, lambda: 0.0)
        await with_nobody.begin()
        await with_nobody.end()
        assert with_nobody.first is None
        assert with_nobody.last is None
    finally:
        await client.close()
        await nobody.close()
        server.close()
