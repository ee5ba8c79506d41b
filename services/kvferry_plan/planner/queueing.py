"""Waiting times of a pool of equal servers (M/G/c)."""

# Probability of waiting: Erlang's C. Its mean for general service times: Allen and Cunneen's approximation (Allen,
# Probability, Statistics, and Queueing Theory, 1990), exact for c = 1 (Pollaczek and Khinchine). Tail: exponential with
# that mean.

from __future__ import annotations

import math


def erlang_c(num_servers: int, offered: float) -> float:
    """Return the probability that an arrival waits. `offered` is rate times service time; 1.0 at or over capacity."""
    if offered >= num_servers:
        return 1.0
    blocked = 1.0  # Erlang's B by its recursion, which neither overflows nor cancels
    for k in range(1, num_servers + 1):
        blocked = offered * blocked / (k + offered * blocked)
    use = offered / num_servers
    return blocked / (1 - use * (1 - blocked))


def wait_quantile_s(
    num_servers: int, rate_per_s: float, service_s: float, service_cv2: float, quantile: float
) -> float:
    """Return the waiting time that the share `quantile` of arrivals stays below; infinite at or over capacity."""
    offered = rate_per_s * service_s
    if offered >= num_servers:
        return math.inf
    waiting = erlang_c(num_servers, offered)
    if waiting <= 1 - quantile:
        return 0.0
    mean_of_waiting = service_s / (num_servers - offered) * (1 + service_cv2) / 2
    return mean_of_waiting * math.log(waiting / (1 - quantile))
