"""The fourteen rows of TAPS's main table: seven variants of HASS and of EAGLE-2 drafters, and small ones of one's own.

    python -m taps_jax.eval --config=configs/table.py --workloads=mt_bench,gsm8k,math_500,svamp --temperatures=0,1
    python -m taps_jax.eval --config=configs/table.py:smollm2 \\
        --workloads=mini_mt_bench,mini_gsm8k,mini_math_500,mini_svamp --temperatures=0,1

The first takes the eight drafters that `configs/hass.py` and `configs/eagle2.py` train, from `runs/`; the trees, the
limit of 512 tokens and the system prompt are the paper's. The second composes the specialists that come with the
package in every way there is, on trees that suit a CPU.
"""

from taps_jax.evaluation.plan import base_config
from taps_jax.evaluation.prompts import PAPER_SYSTEM_PROMPT

OBJECTIVES = {"hass": "HASS", "eagle2": "EAGLE-2"}
DATA = {"math70k": "MathInstruct", "sharegpt70k": "ShareGPT", "mixed35k": "Mixed 35k+35k", "mixed70k": "Mixed 70k+70k"}


def get_config(variant: str = "paper"):
    """`paper` or `smollm2`."""
    return {"paper": _paper, "smollm2": _smollm2}[variant]()


def _paper():
    config = base_config()
    config.verifier = "meta-llama/Meta-Llama-3-8B-Instruct"
    config.system_prompt = PAPER_SYSTEM_PROMPT
    config.max_new_tokens = 512
    rows = []
    for objective, title in OBJECTIVES.items():
        for data, label in DATA.items():
            config.drafters[f"{objective}-{data}"] = f"runs/{objective}-{data}/drafter"
            rows.append((f"{label} / {title}", "single", (f"{objective}-{data}",)))
        specialists = (f"{objective}-math70k", f"{objective}-sharegpt70k")
        config.averages[f"{objective}-averaged"] = dict.fromkeys(specialists, 0.5)
        rows += [
            (f"Averaged / {title}", "single", (f"{objective}-averaged",)),
            (f"Confidence routed / {title}", "route:confidence", specialists),
            (f"Merged trees / {title}", "merge:concat", specialists),
        ]
    config.rows = tuple(rows)
    return config


def _smollm2():
    config = base_config()
    config.tree = "8/3/3"
    specialists = ("math", "chat")
    config.averages.averaged = dict.fromkeys(specialists, 0.5)
    config.rows = (
        ("Math", "single", ("math",)),
        ("Chat", "single", ("chat",)),
        ("Averaged", "single", ("averaged",)),
        ("Confidence routed", "route:confidence", specialists),
        ("Entropy routed", "route:entropy", specialists),
        ("Entropy routed per step", "route:entropy-step", specialists),
        ("Likelihood routed", "route:likelihood", specialists),
        ("Merged trees", "merge:concat", specialists),
        ("Merged trees, same budget", "merge:trie", specialists),
    )
    return config
