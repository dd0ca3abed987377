#!/usr/bin/env bash
# The main job on a real model, about eleven minutes on two CPU cores after installation:
# checks the shipped training answers, trains a HASS drafter on them, and measures it on held-out questions.
# A second run reuses the features and the trained drafter in runs/smollm2.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
started=$SECONDS

assets=taps_jax/assets
echo "1/3 rewriting 16 of the verifier's 200 training answers"
python -m taps_jax.regenerate --questions=$assets/questions/math_train.jsonl,$assets/questions/chat_train.jsonl \
    --compare=$assets/answers/smollm2_train.jsonl --num_questions=16

echo "2/3 training a drafter"
python -m taps_jax.train --config=configs/smollm2.py --workdir=runs/smollm2

echo "3/3 measuring it on held-out questions"
python -m taps_jax.eval --verifier=smollm2 --drafter=runs/smollm2/drafter \
    --questions=$assets/questions/math_heldout.jsonl,$assets/questions/chat_heldout.jsonl --max_new_tokens=96
echo "done in $((SECONDS - started)) s"
