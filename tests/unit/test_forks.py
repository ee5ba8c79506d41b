"""Processes that use gRPC start others, such as engines, etcd and commands."""

from __future__ import annotations

import subprocess
import sys

import pytest

# As multiprocessing starts engines: without vfork, beside threads that are calling.
PROGRAM = """
import subprocess, sys, threading
from concurrent.futures import ThreadPoolExecutor

import {package}
import grpc

subprocess._USE_VFORK = False


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)


server = grpc.server(ThreadPoolExecutor(2))
port = server.add_insecure_port("127.0.0.1:0")
server.add_generic_rpc_handlers((Echo(),))
server.start()
echo = grpc.insecure_channel(f"127.0.0.1:{{port}}").unary_unary("/kvferry/Echo")
is_over = threading.Event()


def ask():
    while not is_over.is_set():
        echo(b"x")


threads = [threading.Thread(target=ask) for _ in range(2)]
for thread in threads:
    thread.start()
statuses = [subprocess.run(["true"], stderr=subprocess.DEVNULL).returncode for _ in range(150)]
is_over.set()
for thread in threads:
    thread.join()
server.stop(0)
print(sorted(set(statuses)))
"""


@pytest.mark.parametrize("package", ["kvferry", "kvferry_loadtest"])
def test_children_reach_their_program_beside_calls_of_grpc(package: str) -> None:
    """Without the setting of the package, 1 of 40 aborts."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(package=package)], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout == "[0]\n"
