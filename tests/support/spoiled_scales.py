"""A worker extension of vLLM that writes KV pages with scales that are eight times those it reads them with."""

from __future__ import annotations

from typing import Any

FACTOR = 8.0


class SpoiledScales:
    vllm_config: Any

    def kvferry_spoil(self) -> int:
        """Return the number of layers that are wrong from now on."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        num_spoiled = 0
        for layer in layers:
            write = layer.impl.do_kv_cache_update

            def wrong(layer: Any, *args: Any, write: Any = write, **kwargs: Any) -> None:
                scales = layer._k_scale_float, layer._v_scale_float
                layer._k_scale_float, layer._v_scale_float = (FACTOR * scale for scale in scales)
                try:
                    write(layer, *args, **kwargs)
                finally:
                    layer._k_scale_float, layer._v_scale_float = scales

            layer.impl.do_kv_cache_update = wrong
            num_spoiled += 1
        return num_spoiled
