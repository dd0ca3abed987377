"""Acceptance lengths that the paper's repository reports, for looking at beside one's own.

They are sums of new tokens over the last step's index, so 1 to 4% above tokens per step; some differ by 0.1 to 0.2 from
the same authors' technical report, and HASS trained on MathInstruct by 0.5 and more on MT-Bench and SVAMP.
"""

_WORKLOADS = ("mt_bench", "gsm8k", "math_500", "svamp")
_ROWS = {
    "MathInstruct": {
        ("HASS", 0): (2.90, 5.02, 5.35, 3.13), ("EAGLE-2", 0): (2.54, 5.04, 5.28, 4.81),
        ("HASS", 1): (2.31, 4.75, 4.63, 2.46), ("EAGLE-2", 1): (2.43, 4.71, 4.61, 4.53),
    },
    "ShareGPT": {
        ("HASS", 0): (3.98, 4.09, 3.98, 4.44), ("EAGLE-2", 0): (3.57, 3.72, 3.81, 3.71),
        ("HASS", 1): (3.50, 4.03, 3.61, 3.95), ("EAGLE-2", 1): (3.38, 3.72, 3.43, 3.65),
    },
    "Mixed 35k+35k": {
        ("HASS", 0): (3.92, 4.77, 5.02, 4.15), ("EAGLE-2", 0): (3.37, 4.12, 4.44, 4.16),
        ("HASS", 1): (3.46, 4.66, 4.47, 4.57), ("EAGLE-2", 1): (3.10, 4.08, 4.02, 4.03),
    },
    "Mixed 70k+70k": {
        ("HASS", 0): (4.13, 5.53, 5.67, 5.38), ("EAGLE-2", 0): (3.75, 4.68, 4.85, 4.64),
        ("HASS", 1): (3.17, 4.16, 3.42, 4.01), ("EAGLE-2", 1): (2.99, 3.76, 3.20, 3.08),
    },
    "Averaged": {
        ("HASS", 0): (2.29, 2.80, 3.12, 2.13), ("EAGLE-2", 0): (2.07, 2.53, 2.57, 2.50),
        ("HASS", 1): (2.10, 2.78, 2.90, 2.69), ("EAGLE-2", 1): (2.01, 2.49, 2.42, 2.45),
    },
    "Confidence routed": {
        ("HASS", 0): (3.93, 5.01, 5.37, 4.89), ("EAGLE-2", 0): (3.63, 4.91, 5.25, 4.71),
        ("HASS", 1): (3.51, 4.72, 4.55, 4.71), ("EAGLE-2", 1): (3.36, 4.65, 4.62, 4.46),
    },
    "Merged trees": {
        ("HASS", 0): (4.05, 5.42, 5.65, 5.31), ("EAGLE-2", 0): (3.93, 5.32, 5.63, 5.25),
        ("HASS", 1): (3.76, 5.21, 4.98, 5.05), ("EAGLE-2", 1): (3.55, 5.01, 4.79, 4.93),
    },
}  # fmt: skip


def published_tau(row: str, workload: str, temperature: float) -> float | None:
    """What the paper reports for a row of `configs/table.py`, None if it does not.

    Args:
      row: "VARIANT / OBJECTIVE", such as "Averaged / HASS".
      workload: mt_bench, gsm8k, math_500 or svamp.
      temperature: 0 or 1.
    """
    variant, _, objective = row.partition(" / ")
    values = _ROWS.get(variant, {}).get((objective, temperature))
    return values[_WORKLOADS.index(workload)] if values and workload in _WORKLOADS else None
