"""HASS drafters for Meta-Llama-3-8B-Instruct with the values of TAPS, one for each of its training sets.

    python -m taps_jax.train --config=configs/hass.py:math70k --workdir=runs/hass-math70k
    python -m taps_jax.train --config=configs/hass.py:sharegpt70k --workdir=runs/hass-sharegpt70k
    python -m taps_jax.train --config=configs/hass.py:mixed35k --workdir=runs/hass-mixed35k
    python -m taps_jax.train --config=configs/hass.py:mixed70k --workdir=runs/hass-mixed70k

Without a name the data is given by --config.data.conversations. `:original` behind the name turns on what the original
code does and this one does not by default: a fusing projection with a bias, and masked attention scores that are zero
rather than minus infinity.

Hardware of the original: 4 x A100, 20 epochs of about 68,000 conversations at 32 rows a step. The schedule counts
optimizer steps; the original's counts four times as fast on four GPUs, and this is where it ends, for 140,000
conversations too. Acceptance length published for ShareGPT on MT-Bench at temperature 0: 3.98.

HASS's own recipe has two stages: train with --config.objective.topk_weight=0, then again with
--config.drafter.init_from=DIR --config.optimizer.learning_rate=1e-5.
"""

from taps_jax.training.config import base_config, with_paper_data


def get_config(variant: str = ""):
    """Empty, or one of the names above, perhaps followed by `:original`."""
    return with_paper_data(base_config(), variant)
