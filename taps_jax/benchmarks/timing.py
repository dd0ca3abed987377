"""Timing of device functions, and what the machine could do at best."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Timing(NamedTuple):
    """Milliseconds of repeated calls."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.least:.1f}-{self.most:.1f})"


class Machine(NamedTuple):
    """Measured limits: memory bandwidth in GB/s by a large update in place, product rate in GFLOP/s."""

    bandwidth: float
    product_rate: float

    def bound(self, gigabytes: float, gigaflops: float) -> float:
        """The least milliseconds that reading and computing that much can take."""
        return max(gigabytes / self.bandwidth, gigaflops / self.product_rate) * 1e3


def time_call(function: Callable[[], Any], repeats: int = 15) -> Timing:
    """Times `function`, whose result is waited for; the first calls, which compile, do not count."""
    for _ in range(2):
        jax.block_until_ready(function())
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds) * 1e3, min(seconds) * 1e3, max(seconds) * 1e3)


def measure_machine(dtype: jnp.dtype, size: int = 2048) -> Machine:
    """Reading and writing 512 MB, and a square product of `size` in `dtype`."""
    box = [jnp.ones((128, 1024, 1024), jnp.float32)]
    # In place: a new array for every result would measure how fast the system hands out pages.
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)

    def copy() -> jax.Array:
        box[0] = add_one(box[0])
        return box[0]

    copied = time_call(copy, 5)
    square = jnp.ones((size, size), dtype)
    product = jax.jit(lambda x: x @ x)
    multiplied = time_call(lambda: product(square), 5)
    return Machine(2 * box[0].nbytes / 1e6 / copied.least, 2 * size**3 / 1e6 / multiplied.least)
