"""The layouts of a drafter that other engines load, and a check of a directory against each engine's rules, key by key.

`eagle` is what the EAGLE and HASS code loads, the second of which insists on a copy of the embedding; `sglang` what
SGLang's EAGLE worker loads, which builds the fusion with a bias whatever the config says; `vllm` what vLLM loads, which
builds it without one. Both share embedding and head with the verifier.
"""

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from taps_jax.checkpoints.hf_verifier import read_json
from taps_jax.checkpoints.tensors import stored_in
from taps_jax.errors import InputError
from taps_jax.models.config import LLAMA

EMBEDDING, BIAS = "embed_tokens.weight", "fc.bias"
TOKEN_MAP = "hot_token_ids.pt"


@dataclasses.dataclass(frozen=True)
class Flavour:
    """What an engine wants.

    Attributes:
      architecture: in config.json.
      bias: `required`, `refused` or `optional`: a bias of the fusing projection.
      embedding: likewise, a copy of the verifier's embedding.
      loads_with: where the directory goes.
    """

    architecture: str
    bias: str
    embedding: str
    loads_with: str


FLAVOURS = {
    "eagle": Flavour(LLAMA, "optional", "required", "EAGLE-1/2 and HASS code (ea_model_path)"),
    "sglang": Flavour("LlamaForCausalLMEagle", "required", "optional", "SGLang (--speculative-algorithm EAGLE)"),
    "vllm": Flavour(LLAMA, "refused", "optional", 'vLLM (speculative_config method "eagle")'),
}


def flavour_problems(directory: Path, name: str) -> list[str]:
    """Why an engine would not load `directory`, key by key; empty if it would."""
    flavour = FLAVOURS[name]
    try:
        fields = read_json(directory / "config.json")
        with ExitStack() as stack:
            stored = stored_in(directory, "model", stack)
    except InputError as error:
        return [str(error)]
    problems = list(stored.problems)
    if fields.get("architectures") != [flavour.architecture]:
        problems.append(f"architectures is {fields.get('architectures')}, expected ['{flavour.architecture}']")
    try:
        expected = _expected_shapes(fields)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        return [*problems, f"config.json lacks a usable {error}"]
    for key, rule in ((BIAS, flavour.bias), (EMBEDDING, flavour.embedding)):
        if rule == "refused" or (rule == "optional" and key not in stored.tensors):
            del expected[key]
    for key, shape in expected.items():
        if key not in stored.tensors:
            problems.append(f"missing tensor {key}")
        elif stored.tensors[key].shape != shape:
            problems.append(f"{key} has shape {list(stored.tensors[key].shape)}, expected {list(shape)}")
    return problems + [f"unexpected tensor {key}" for key in stored.tensors if key not in expected]


def _expected_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every key that some engine knows, with its shape by config.json."""
    width, inner, heads = fields["hidden_size"], fields["intermediate_size"], fields["num_attention_heads"]
    head = fields.get("head_dim") or width // heads
    keys = (fields.get("num_key_value_heads") or heads) * head
    layer = {
        "self_attn.q_proj": (heads * head, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, heads * head),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "post_attention_layernorm": (width,),
    }
    return {
        EMBEDDING: (fields["vocab_size"], width),
        "fc.weight": (width, 2 * width),
        BIAS: (width,),
        **{f"layers.0.{part}.weight": shape for part, shape in layer.items()},
    }
