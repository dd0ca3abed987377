"""Plain greedy decoding by transformers with torch on the same weights, prompts and threads."""

import time
from collections.abc import Sequence

import numpy as np

from taps_jax.checkpoints.keymap import flatten
from taps_jax.checkpoints.verifier import Verifier
from taps_jax.models.config import llama_config_to_hf


def transformers_tokens_per_second(verifier: Verifier, prompts: Sequence[tuple[int, ...]], new_tokens: int) -> float:
    """Tokens per second of `generate(do_sample=False)` in float32, after warming up.

    Raises:
      ImportError: torch is not installed.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**llama_config_to_hf(verifier.config))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = {name: torch.from_numpy(np.array(leaf)) for name, leaf in flatten(verifier.params).items()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, assign=True)
    model = _with_rotary_buffers(model, config).eval()

    def answer(tokens: tuple[int, ...], count: int) -> int:
        ids = torch.tensor([tokens])
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return out.shape[1] - ids.shape[1]

    with torch.no_grad():
        answer(prompts[0], 2)
        start = time.perf_counter()
        generated = sum(answer(tokens, new_tokens) for tokens in prompts)
        return generated / (time.perf_counter() - start)


def _with_rotary_buffers(model, config):
    """The rotary frequencies are not in the weights; made on the meta device they would hold nothing."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model
