"""kvferry's NIXL connector for vLLM, which damages the pages that arrived; loaded by the engines of `bench.proof`.

The damage of the next transfers is the word in the file that `DAMAGE_VARIABLE` names.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import MambaSpec

from bench.proof import DAMAGE_VARIABLE, STALE_STATE
from kvferry.engine.vllm.plugins.nixl.nixl_connector import KvTransferConnector

Pages = Sequence[torch.Tensor]  # by region, of shape (blocks, bytes)


class DamagingConnector(KvTransferConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER and not vllm_config.kv_transfer_config.is_kv_producer:
            file = Path(os.environ[DAMAGE_VARIABLE])
            has_state = [isinstance(group.kv_cache_spec, MambaSpec) for group in kv_cache_config.kv_cache_groups]
            _Damaging(self.connector_worker, file, vllm_config, has_state)


class _Damaging:
    def __init__(self, worker: Any, file: Path, vllm_config: Any, has_state: Sequence[bool]) -> None:
        """`has_state`: by group of layers, whether its blocks are recurrent states."""
        self._worker, self._file, self._has_state = worker, file, has_state
        self._states_before: dict[str, dict[int, list[torch.Tensor]]] = {}  # by request and block, by region
        self._num_heads = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
        self._before: dict[str, list[torch.Tensor]] = {}  # by request: its last block as it was, by region
        self._kept: list[torch.Tensor] = []  # the first block of the transfer before
        self._read, self._results = worker._read_blocks_for_req, worker.get_transfer_results
        worker._read_blocks_for_req, worker.get_transfer_results = self.read_blocks, self.get_transfer_results

    def read_blocks(self, request_id: str, meta: Any) -> None:
        if blocks := _blocks(meta):
            pages = self._pages()
            self._before[request_id] = [region[blocks[-1]].clone() for region in pages]
            states = [block for group, is_state in zip(meta.local_physical_block_ids, self._has_state, strict=True)
                      if is_state for block in map(int, group)]  # fmt: skip
            self._states_before[request_id] = {block: [region[block].clone() for region in pages] for block in states}
        self._read(request_id, meta)

    def get_transfer_results(self) -> Any:
        receiving = dict(self._worker._recving_metadata)
        results = self._results()
        for request_id in results.finished_recving - results.failed_recving:
            before, states = self._before.pop(request_id, None), self._states_before.pop(request_id, {})
            blocks = _blocks(receiving[request_id])
            if before is not None and blocks:
                pages = self._pages()
                right = [region[blocks[0]].clone() for region in pages]
                damage = self._file.read_text().strip()
                if damage == "of-another-layer":
                    _rotate_layers(pages, receiving[request_id].local_physical_block_ids)
                elif damage == STALE_STATE:
                    for block, regions in states.items():
                        _restore(pages, [block], regions)
                elif damage:
                    self._damages()[damage](pages, blocks, before)
                self._kept = right
        return results

    def _pages(self) -> list[torch.Tensor]:
        worker = self._worker
        found = []
        for region, base in enumerate(worker.kv_caches_base_addr[worker.engine_id][worker.tp_rank]):
            cache = worker.device_kv_caches[worker.region_names[region]]
            storage = cache.untyped_storage()
            shape = (worker.region_num_blocks[region], worker.block_len_per_layer[region])
            found.append(
                torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
                    storage, base - storage.data_ptr(), shape, (worker.block_stride_per_layer[region], 1)
                )
            )
        return found

    def _damages(self) -> Mapping[str, Callable[[Pages, Sequence[int], Pages], None]]:
        return {
            "exchanged": _exchange,
            "shifted": _shift,
            "of-another-prompt": self._replace,
            "keys-for-values": _exchange_halves,
            "head-zeroed": self._zero_head,
            "scale-lost": self._scale,
            "stale": _restore,
        }

    def _replace(self, pages: Pages, blocks: Sequence[int], before: Pages) -> None:
        for region, other in zip(pages, self._kept, strict=False):
            region[blocks[0]] = other

    def _zero_head(self, pages: Pages, blocks: Sequence[int], before: Pages) -> None:
        for region in pages:
            for block in blocks:
                region[block, : region.shape[1] // (2 * self._num_heads)] = 0

    def _scale(self, pages: Pages, blocks: Sequence[int], before: Pages) -> None:
        for region, cache in zip(pages, self._caches(), strict=True):
            for block in blocks:
                values = region[block].view(cache.dtype)
                values.copy_((values.to(torch.float32) * 1.25).to(cache.dtype))

    def _caches(self) -> list[torch.Tensor]:
        return [self._worker.device_kv_caches[name] for name in self._worker.region_names]


def _blocks(meta: Any) -> list[int]:
    groups = meta.local_physical_block_ids
    return [int(block) for block in groups[0]] if groups else []


def _exchange(pages: Pages, blocks: Sequence[int], before: Pages) -> None:
    # Two pages that change places would not change an answer: positions are in the keys, whose order is not looked at.
    if len(blocks) > 1:
        for region in pages:
            region[blocks[0]] = region[blocks[1]]


def _shift(pages: Pages, blocks: Sequence[int], before: Pages) -> None:
    for region in pages:
        region[list(blocks[:-1])] = region[list(blocks[1:])]


def _rotate_layers(pages: Pages, groups: Sequence[Sequence[int]]) -> None:
    """Give each layer the page of the next one. Layers of other groups have other blocks, perhaps of one region."""
    places = [[(region, int(block)) for region in pages for block in same] for same in zip(*groups, strict=False)]
    for layers in places:
        first = layers[0][0][layers[0][1]].clone()
        for (here, block), (there, other) in itertools.pairwise(layers):
            here[block] = there[other]
        last, block = layers[-1]
        last[block] = first


def _exchange_halves(pages: Pages, blocks: Sequence[int], before: Pages) -> None:
    for region in pages:
        half = region.shape[1] // 2
        for block in blocks:
            region[block] = torch.cat((region[block, half:], region[block, :half]))


def _restore(pages: Pages, blocks: Sequence[int], before: Pages) -> None:
    for region, other in zip(pages, before, strict=True):
        region[blocks[-1]] = other
