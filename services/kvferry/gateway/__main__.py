"""A gateway as its own process without Ray, for Kubernetes.

Exit code 0 after SIGTERM or SIGINT and draining, 1 if it cannot start, 2 for a bad configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from kvferry import config as configuration
from kvferry import model_folder
from kvferry.config import ClusterConfig
from kvferry.engine.vllm.rendering.text_model import use_cpu_platform
from kvferry.errors import ConfigError, KvferryError
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.membership.etcd import EtcdMembership
from kvferry.util.addresses import node_address

log = logging.getLogger(__name__)


async def serve(config: ClusterConfig, model_folder: str) -> None:
    """Serve until a signal. Raises KvferryError if the gateway cannot start."""
    host = GatewayHost(config, model_folder, EtcdMembership(config.membership))
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    starting = asyncio.create_task(host.start())
    stop_requested = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait((starting, stop_requested), return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            return
        await starting
        await stop_requested
        log.info("%s drains", host.gateway_id)
        await host.drain()
    finally:
        stop_requested.cancel()
        starting.cancel()
        await asyncio.gather(starting, stop_requested, return_exceptions=True)
        await host.stop()


def _model_folder(config: ClusterConfig, name: str) -> str:
    if config.engine.kind == "sim" or not config.serves_default:
        return name
    return str(model_folder.resolve(name, report=log.info, with_weights=False))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvferry.gateway", description="Run one gateway.")
    parser.add_argument("--config", type=Path, required=True, help="a YAML configuration with membership.endpoints")
    parser.add_argument("--model-folder", default="", help="the model's folder, or its hub id: weights are not needed")
    arguments = parser.parse_args()
    use_cpu_platform()
    try:
        config = configuration.load(arguments.config).on_node(node_address())
        logging.basicConfig(
            level=config.log_level,
            stream=sys.stderr,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        )
        asyncio.run(serve(config, _model_folder(config, arguments.model_folder or config.model.path)))
    except KvferryError as error:
        print(error.message, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:
        print(f"gateway.host, gateway.http_port: cannot listen: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
