"""HASS drafter for Meta-Llama-3-8B-Instruct with the values of TAPS.

    python -m taps_jax.train --config=configs/hass.py --workdir=runs/hass \
        --config.data.conversations="('conversations.jsonl',)"

Hardware of the original: 4 x A100, 20 epochs of about 68,000 conversations at 32 rows a step. The schedule counts
optimizer steps; the original's counts four times as fast on four GPUs, and this is where it ends. Acceptance length
published for ShareGPT on MT-Bench at temperature 0: 3.98.
"""

from taps_jax.training.config import base_config


def get_config():
    return base_config()
