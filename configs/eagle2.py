"""EAGLE-2 drafters for Meta-Llama-3-8B-Instruct with the values of TAPS, one for each of its training sets.

    python -m taps_jax.train --config=configs/eagle2.py:math70k --workdir=runs/eagle2-math70k

The names are those of `configs/hass.py`: math70k, sharegpt70k, mixed35k, mixed70k, perhaps followed by `:original`.

One pass over the verifier's features and no top-k loss, otherwise as HASS. Hardware of the original: 4 x A100, 20
epochs of 70,000 conversations (95% of them for training) at 32 rows a step. Its learning rate would reach 0 at step
200,000 only, so training ends at 79% of the peak rate.
"""

from taps_jax.training.config import base_config, with_paper_data


def get_config(variant: str = ""):
    """Empty, or a training set of the paper's, perhaps followed by `:original`."""
    config = base_config()
    config.data.max_length = 2048
    config.objective.passes = 1
    config.objective.topk_weight = 0.0
    config.optimizer.warmup_steps = 500
    config.optimizer.schedule_steps = 200_000
    config.total_steps = 41_560
    return with_paper_data(config, variant)
