"""Model configurations, read from and written to Hugging Face `config.json` fields."""

import dataclasses
import math
from typing import Any

from taps_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent stretching of the rotary angles, as Llama 3.1 does it."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama-architecture decoder; field names are those of Hugging Face."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen3: queries and keys are normed per head before their rotation


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE-2/HASS drafter: one decoder layer of `layer`'s shape behind a fusing projection."""

    layer: LlamaConfig
    fc_bias: bool = False


LLAMA, QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"
_MODEL_TYPES = {LLAMA: "llama", QWEN3: "qwen3"}
# A number beyond these is a damaged file, and would have the shapes of its parameters computed all the same.
_MOST_LAYERS, _MOST = 1000, 2**31 - 1
_INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)


def llama_config_from_hf(fields: dict[str, Any], where: str) -> LlamaConfig:
    """Reads the fields of a Llama or Qwen3 `config.json`, in the style of transformers 4 or 5.

    Args:
      fields: the parsed JSON object.
      where: what to call the source in error messages, usually a path.
    Raises:
      InputError: the architecture is another one, or fields are missing, of the wrong type or ask for something this
        model lacks; all problems at once.
    """
    architectures = fields.get("architectures") or [LLAMA]
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in _MODEL_TYPES:
        raise InputError(f"{where}: architectures is {architectures!r}, supported are {', '.join(_MODEL_TYPES)}")
    problems = [
        f"{name} is {fields.get(name)!r}, expected {_expected_size(name)}"
        for name in _INTEGERS
        if not _is_size(name, fields.get(name))
    ]
    for name in ("num_key_value_heads", "head_dim"):
        if fields.get(name) is not None and not _is_size(name, fields[name]):
            problems.append(f"{name} is {fields[name]!r}, expected {_expected_size(name)}")
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        if not isinstance(fields.get(name) or False, bool):
            problems.append(f"{name} is {fields[name]!r}, expected true or false")
    eps = fields.get("rms_norm_eps")
    if not _is_number(eps) or eps <= 0:
        problems.append(f"rms_norm_eps is {eps!r}, expected a positive number")
    problems += _unsupported(fields)
    theta, scaling = _rope(fields, problems)
    if not problems:
        heads, kv_heads = fields["num_attention_heads"], _kv_heads(fields)
        if heads % kv_heads:
            problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if fields.get("head_dim") is None and fields["hidden_size"] % heads:
            problems.append(f"hidden_size {fields['hidden_size']} is not a multiple of num_attention_heads {heads}")
        elif _head_dim(fields) % 2:
            problems.append(f"head_dim {_head_dim(fields)} is odd, rotary positions need pairs")
    if problems:
        raise InputError(f"{where}: " + "; ".join(problems))
    return LlamaConfig(
        **{name: fields[name] for name in _INTEGERS},
        num_key_value_heads=_kv_heads(fields),
        head_dim=_head_dim(fields),
        rms_norm_eps=float(eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.get("tie_word_embeddings") or False,
        attention_bias=fields.get("attention_bias") or False,
        mlp_bias=fields.get("mlp_bias") or False,
        qk_norm=architectures == [QWEN3],
    )


def llama_config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The `config.json` fields of `config`, readable by transformers 4 (`rope_theta`) and 5 (`rope_parameters`)."""
    fields = dataclasses.asdict(config)
    scaling = fields.pop("rope_scaling")
    rope = {"rope_type": "llama3", **scaling} if scaling else None
    architecture = QWEN3 if fields.pop("qk_norm") else LLAMA
    return {
        **fields,
        "model_type": _MODEL_TYPES[architecture],
        "architectures": [architecture],
        "hidden_act": "silu",
        "rope_scaling": rope,
        "rope_parameters": {"rope_type": "default", **(rope or {}), "rope_theta": config.rope_theta},
    }


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(name: str, value: Any) -> bool:
    most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST
    return _is_integer(value) and 1 <= value <= most


def _expected_size(name: str) -> str:
    return f"an integer from 1 to {_MOST_LAYERS}" if name == "num_hidden_layers" else "a positive integer"


def _unsupported(fields: dict[str, Any]) -> list[str]:
    """What the model is asked for and lacks."""
    problems = []
    if fields.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {fields['hidden_act']!r}, only 'silu' is supported")
    if fields.get("quantization_config"):
        problems.append("quantization_config is set, only unquantised weights are supported")
    if fields.get("use_sliding_window"):
        problems.append("use_sliding_window is set, only full attention is supported")
    kinds = fields.get("layer_types") or []
    others = sorted({str(kind) for kind in kinds} - {"full_attention"}) if isinstance(kinds, list) else [str(kinds)]
    if others:
        problems.append(f"layer_types has {', '.join(others)}, only full_attention is supported")
    if fields.get("partial_rotary_factor") not in (None, 1, 1.0):
        problems.append(f"partial_rotary_factor is {fields['partial_rotary_factor']!r}, only 1 is supported")
    if fields.get("pretraining_tp") not in (None, 1):
        problems.append(f"pretraining_tp is {fields['pretraining_tp']!r}, only 1 is supported")
    return problems


def _kv_heads(fields: dict[str, Any]) -> int:
    return fields.get("num_key_value_heads") or fields["num_attention_heads"]


def _head_dim(fields: dict[str, Any]) -> int:
    # Qwen3 leaves it out only when it is 128, whatever the width.
    absent = 128 if fields.get("architectures") == [QWEN3] else fields["hidden_size"] // fields["num_attention_heads"]
    return fields.get("head_dim") or absent


def _rope(fields: dict[str, Any], problems: list[str]) -> tuple[float, Llama3RopeScaling | None]:
    """Rotary base and scaling; transformers 5 keeps both in `rope_parameters`, 4 in two fields."""
    parameters = fields.get("rope_parameters") or {}
    scaling = parameters or fields.get("rope_scaling") or {}
    if not isinstance(parameters, dict) or not isinstance(scaling, dict):
        problems.append("rope_parameters and rope_scaling must be objects or null")
        return 0.0, None
    stated = [place["rope_theta"] for place in (fields, parameters) if place.get("rope_theta") is not None]
    if len(stated) == 2 and stated[0] != stated[1]:
        problems.append(f"rope_theta is {stated[0]!r}, but {stated[1]!r} in rope_parameters")
    theta = parameters.get("rope_theta", fields.get("rope_theta", 10000.0))
    if not _is_number(theta) or theta <= 0:
        problems.append(f"rope_theta is {theta!r}, expected a positive number")
        return 0.0, None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        problems.append(f"rope type {kind!r} is not supported, only 'default' and 'llama3' are")
        return float(theta), None
    names = [field.name for field in dataclasses.fields(Llama3RopeScaling)]
    bad = [name for name in names if not _is_number(scaling.get(name)) or scaling[name] <= 0]
    if bad:
        problems.append(f"llama3 rope scaling needs positive numbers for {', '.join(bad)}")
        return float(theta), None
    if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        problems.append("llama3 rope scaling needs high_freq_factor above low_freq_factor")
        return float(theta), None
    return float(theta), Llama3RopeScaling(**{name: scaling[name] for name in names})
