"""Every field of a training configuration, with the values of TAPS's HASS drafters as defaults."""

from ml_collections import ConfigDict

# Training sets of TAPS, section 4.
PAPER_DATA = {
    "math70k": "mathinstruct:70000",
    "sharegpt70k": "sharegpt:70000",
    "mixed35k": "sharegpt:35000+mathinstruct:35000",
    "mixed70k": "sharegpt:70000+mathinstruct:70000",
}


def base_config() -> ConfigDict:
    """A locked configuration: setting a field that is not here is an error."""
    config = ConfigDict()
    config.verifier = "meta-llama/Meta-Llama-3-8B-Instruct"
    config.seed = 0
    config.total_steps = 40_375  # optimizer steps to train for

    config.data = ConfigDict()
    # Files (.jsonl, .json, .parquet), hub datasets, or mixtures of them by count: "sharegpt:35000+mathinstruct:35000".
    config.data.conversations = ()
    config.data.system_prompt = ""  # for conversations that have no system message of their own
    config.data.max_length = 1024  # tokens per row; longer conversations are cut
    config.data.batch_size = 32  # rows per optimizer step, over all devices
    config.data.accumulate = 1  # parts a step's rows are split into, to save memory
    config.data.length_window = 1  # batches among which rows of about one length go together; 1: by chance
    config.data.draft_vocabulary = 0  # token ids the drafter may propose; 0 is all
    config.data.vocabulary_conversations = ()  # files whose answers are counted for them; empty: those trained on

    config.features = ConfigDict()
    config.features.source = "cached"  # "cached": computed once, kept in the workdir; "online": in every step
    config.features.dtype = "bfloat16"  # of the cache; "float16" is finer, and refused when a value does not fit

    config.drafter = ConfigDict()
    config.drafter.fc_bias = False
    config.drafter.init_from = ""  # a drafter directory to start from

    config.objective = ConfigDict()
    config.objective.passes = 3
    config.objective.feature_weight = 1.0
    config.objective.soft_weight = 0.1
    config.objective.topk_weight = 1.0
    config.objective.topk = 10
    config.objective.overlap_weight = 0.0  # of -log sum(min(p, q)), which aims at acceptance when sampling
    config.objective.pass_weights = ()  # one for each pass; empty weighs all alike
    config.objective.noise = 0.2  # feature noise is uniform in +-noise/2 * 512 / row length
    config.objective.zero_logit_mask = False

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 3e-5
    config.optimizer.warmup_steps = 404
    config.optimizer.schedule_steps = 40_375  # the rate is 0 from here on
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.01
    config.optimizer.clip_value = 0.5  # of every gradient element

    # Rows that are not trained on: at every checkpoint the drafter is tried on their answers.
    config.heldout = ConfigDict()
    config.heldout.conversations = ()  # as data.conversations; empty: `rows` of those are kept from training
    config.heldout.rows = 0  # 0: none, or all of heldout.conversations
    config.heldout.tree = "60/5/10"  # the draft tree, TOTAL_TOKEN/DEPTH/TOP_K

    config.mesh = ConfigDict()
    config.mesh.data = 0  # 0: all devices that `tensor` leaves
    config.mesh.tensor = 1  # devices that share one copy of the verifier

    config.log_every = 10
    config.checkpoint_every = 500
    config.keep_checkpoints = 2  # the newest
    config.keep_best = 1  # those with the highest held-out acceptance length
    config.wandb_project = ""  # sends metrics to Weights & Biases as well
    return config.lock()


def with_paper_data(config: ConfigDict, variant: str) -> ConfigDict:
    """Sets the training data, and with `original` the quirks of the original code, that a config's argument names.

    Args:
      config: is changed.
      variant: `NAME`, `NAME:original`, `original` or empty; NAME is one of `PAPER_DATA`.
    Raises:
      ValueError: it is something else.
    """
    words = [word for word in variant.split(":") if word]
    if words and words[-1] == "original":
        words.pop()
        config.drafter.fc_bias = True
        config.objective.zero_logit_mask = True
    if len(words) > 1 or (words and words[0] not in PAPER_DATA):
        raise ValueError(f"the config's argument is {variant!r}, expected {', '.join(PAPER_DATA)}, or with :original")
    if words:
        config.data.conversations = (PAPER_DATA[words[0]],)
    return config
