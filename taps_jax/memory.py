"""How much memory the device has left, and how much was used."""

import resource
from pathlib import Path

import jax


def free_bytes() -> int | None:
    """Bytes that the first device can still allocate; on a CPU what the system has available, None where unknown."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def peak_memory_gb() -> float:
    """The most in use so far, in GB: of the first device where it keeps count, else of the process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
