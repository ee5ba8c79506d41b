"""Options of every gRPC channel and server between kvferry's processes."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A silent peer (machine gone, cable cut) is found within seconds, not by TCP's minutes.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The timeout that grpcio 1.85 really uses; with keepalive_timeout_ms alone a hung peer is never noticed.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 4_000),
)
