"""Slow reference for the HASS training objective of one drafter.

Follows the published HASS method: harmonized objective distillation (the
top-K loss) and harmonized context alignment (several passes in which a query
sees the drafter's own earlier predictions at the newest columns), on top of
the EAGLE drafter layer and the EAGLE feature and soft-label losses.  NumPy in
float64, full [L, L] score and mask matrices for every source.  An oracle for
tests only.

Parameters are a flat dict of arrays in the [out, in] layout:
fc.weight [D, 2D] (embedding columns first), optional fc.bias,
layers.0.self_attn.{q,k,v,o}_proj.weight,
layers.0.mlp.{gate,up,down}_proj.weight and
layers.0.post_attention_layernorm.weight.
"""

import numpy as np


def _float64(array):
    return np.asarray(array, dtype=np.float64)


def _source_masks(num_sources, length):
    """One 0/1 [L, L] matrix (query, key) per source, oldest source first."""
    masks = []
    for source in range(num_sources):
        mask = np.zeros((length, length), dtype=np.int64)
        for query in range(length):
            for key in range(length):
                behind = query - key
                if source == 0:
                    # Verifier features: everything old enough.
                    mask[query, key] = behind >= num_sources - 1
                else:
                    # Drafter features: exactly one diagonal.
                    mask[query, key] = behind == num_sources - 1 - source
        masks.append(mask)
    return masks


def source_table(num_sources, length):
    """[L, L] table of the source that query i uses for key j, -1 for none."""
    table = np.full((length, length), -1, dtype=np.int64)
    for source, mask in enumerate(_source_masks(num_sources, length)):
        if np.any(table[mask == 1] != -1):
            raise AssertionError("two sources at one (query, key) pair")
        table[mask == 1] = source
    return table


def _softmax(logits):
    """Softmax over the last axis."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _log_softmax(logits):
    """Log-softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def _silu(x):
    return x / (1.0 + np.exp(-x))


def _rope(x, positions, theta):
    """Half-split rotary embedding of one head: x [L, head_dim]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-2.0 * np.arange(half) / x.shape[-1])
    angles = positions[:, None] * frequencies[None, :]
    cos = np.concatenate([np.cos(angles), np.cos(angles)], axis=-1)
    sin = np.concatenate([np.sin(angles), np.sin(angles)], axis=-1)
    rotated = np.concatenate([-x[:, half:], x[:, :half]], axis=-1)
    return x * cos + rotated * sin


def _fuse(params, embeddings, source):
    """The fc layer on concat(embedding, feature)."""
    fused = np.concatenate([embeddings, source], axis=-1)
    fused = fused @ _float64(params["fc.weight"]).T
    if "fc.bias" in params:
        fused = fused + _float64(params["fc.bias"])
    return fused


def _attend(scores, masks, values, zero_logit_mask):
    """Attention output of one head over several sources.

    scores (scaled, [L, L]), masks (0/1, [L, L]) and values ([L, head_dim])
    are lists with one entry per source.  zero_logit_mask: False for one
    softmax over the allowed (source, key) pairs; True for one softmax over all
    L columns in which a column without an allowed pair has logit 0, after
    which the weights of such columns are dropped.
    """
    if zero_logit_mask:
        combined = sum(m * s for m, s in zip(masks, scores))
        weights = _softmax(combined)
        return sum((m * weights) @ v for m, v in zip(masks, values))
    blocks = [np.where(m == 1, s, -np.inf) for m, s in zip(masks, scores)]
    weights = _softmax(np.concatenate(blocks, axis=-1))
    return weights @ np.concatenate(values, axis=0)


def drafter_layer_reference(params, config, embeddings, sources, zero_logit_mask=False, columns=None):
    """One pass of the drafter over one row.

    Args:
        params: flat dict of arrays, see the module docstring.
        config: dict with num_attention_heads, num_key_value_heads, head_dim,
            rope_theta and rms_norm_eps.
        embeddings: [L, D] embeddings of the shifted tokens.
        sources: list of [L, D] feature arrays, verifier features first and
            the newest drafter features last.
        zero_logit_mask: see _attend; L is the padded length given.
        columns: optional [L] positions for RoPE; 0..L-1 by default.  The
            masks always go by index in the arrays.

    Returns:
        [L, D] predicted features.
    """
    embeddings = _float64(embeddings)
    length = embeddings.shape[0]
    positions = _float64(np.arange(length) if columns is None else columns)
    num_heads = config["num_attention_heads"]
    num_kv_heads = config["num_key_value_heads"]
    head_dim = config["head_dim"]
    theta = float(config["rope_theta"])
    q_proj, k_proj, v_proj, o_proj = (_float64(params[f"layers.0.self_attn.{letter}_proj.weight"]) for letter in "qkvo")

    inputs = [_fuse(params, embeddings, _float64(s)) for s in sources]
    newest = inputs[-1]
    queries = newest @ q_proj.T
    keys = [x @ k_proj.T for x in inputs]
    values = [x @ v_proj.T for x in inputs]
    masks = _source_masks(len(sources), length)

    head_outputs = []
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        q_dims = slice(head * head_dim, (head + 1) * head_dim)
        kv_dims = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
        query = _rope(queries[:, q_dims], positions, theta)
        scores = []
        for key in keys:
            rotated_key = _rope(key[:, kv_dims], positions, theta)
            scores.append(query @ rotated_key.T / np.sqrt(head_dim))
        head_values = [value[:, kv_dims] for value in values]
        output = _attend(scores, masks, head_values, zero_logit_mask)
        head_outputs.append(output)
    attended = np.concatenate(head_outputs, axis=-1)

    hidden = newest + attended @ o_proj.T
    norm = _float64(params["layers.0.post_attention_layernorm.weight"])
    normed = _rms_norm(hidden, norm, config["rms_norm_eps"])
    gate = normed @ _float64(params["layers.0.mlp.gate_proj.weight"]).T
    up = normed @ _float64(params["layers.0.mlp.up_proj.weight"]).T
    down = _float64(params["layers.0.mlp.down_proj.weight"])
    return hidden + (_silu(gate) * up) @ down.T


def _run_passes(params, config, embeddings, features, num_passes, zero_logit_mask, fixed):
    """Returns (preds of the passes, the Q_1 .. Q_{num_passes-1} used)."""
    features = _float64(features)
    preds = []
    drafted_sources = []
    for number in range(num_passes):
        if number > 0:
            if fixed is None:
                # Column j holds the previous pass's estimate of feature j.
                drafted = np.concatenate([features[:1], preds[-1][:-1]])
            else:
                drafted = _float64(fixed[number - 1])
            drafted_sources.append(drafted)
        sources = [features] + drafted_sources
        pred = drafter_layer_reference(params, config, embeddings, sources, zero_logit_mask)
        preds.append(pred)
    return preds, drafted_sources


def hass_passes_reference(params, config, embeddings, features, num_passes, zero_logit_mask=False):
    """List of the [L, D] predictions of all the passes over one row."""
    preds, _ = _run_passes(params, config, embeddings, features, num_passes, zero_logit_mask, None)
    return preds


def _loss_sums(pred, target, mask, head, topk):
    """Masked sums over one row: (feature, soft, top-K, overlap), not normalised."""
    difference = np.abs(pred - target)
    small = difference < 1.0
    smooth_l1 = np.where(small, 0.5 * difference**2, difference - 0.5)
    p = _softmax(target @ head.T)
    q = _log_softmax(pred @ head.T)
    feature_sum, soft_sum, topk_sum, overlap_sum = 0.0, 0.0, 0.0, 0.0
    for position in range(pred.shape[0]):
        cross_terms = p[position] * q[position]
        largest = np.argsort(-p[position], kind="stable")[:topk]
        feature_sum += mask[position] * smooth_l1[position].mean()
        soft_sum -= mask[position] * cross_terms.sum()
        topk_sum -= mask[position] * cross_terms[largest].sum()
        shared = 0.0
        for p_token, log_q_token in zip(p[position], q[position]):
            shared += min(p_token, np.exp(log_q_token))
        overlap_sum -= mask[position] * np.log(shared)
    return feature_sum, soft_sum, topk_sum, overlap_sum


def hass_loss_reference(
    params,
    config,
    embed_table,
    head,
    batch,
    num_passes,
    feature_weight=1.0,
    soft_weight=0.1,
    topk=10,
    topk_weight=1.0,
    zero_logit_mask=False,
    fixed_sources=None,
    overlap_weight=0.0,
    pass_weights=None,
):
    """Training loss of a batch, summed over the passes.

    Args:
        embed_table: [V, D] token embeddings.
        head: [V, D] language-model head of the verifier.
        batch: dict of tokens [B, L], features [B, L, D] (clean), noise
            [B, L, D] and mask [B, L] in {0, 1}, none of them shifted.
        fixed_sources: optional, per row the list Q_1 .. Q_{num_passes-1} to
            use in place of the drafter's own predictions.

    Returns:
        Dict of loss (float), feature, soft, topk and overlap (unweighted, one
        float per pass), preds (one [B, L, D] array per pass) and sources (per row
        the list of the Q's used).
    """
    embed_table, head = _float64(embed_table), _float64(head)
    tokens = np.asarray(batch["tokens"])
    clean, noise = _float64(batch["features"]), _float64(batch["noise"])
    mask = _float64(batch["mask"]).copy()
    mask[:, -1] = 0.0
    normaliser = mask.sum() + 1e-5

    no_features = np.zeros((1, clean.shape[-1]))
    sums = np.zeros((num_passes, 4))
    preds_by_row, sources_by_row = [], []
    for row in range(tokens.shape[0]):
        shifted_tokens = np.append(tokens[row, 1:], 0)
        target = np.concatenate([clean[row, 1:], no_features])
        embedded = embed_table[shifted_tokens]
        noisy = clean[row] + noise[row]
        fixed = None if fixed_sources is None else fixed_sources[row]
        preds, sources = _run_passes(params, config, embedded, noisy, num_passes, zero_logit_mask, fixed)
        for number, pred in enumerate(preds):
            sums[number] += _loss_sums(pred, target, mask[row], head, topk)
        preds_by_row.append(preds)
        sources_by_row.append(sources)

    feature, soft, top, overlap = (sums / normaliser).T
    per_pass = feature_weight * feature + soft_weight * soft
    per_pass = per_pass + topk_weight * top + overlap_weight * overlap
    if pass_weights is not None:
        per_pass = per_pass * _float64(pass_weights)
    return {
        "loss": float(per_pass.sum()),
        "feature": feature.tolist(),
        "soft": soft.tolist(),
        "topk": top.tolist(),
        "overlap": overlap.tolist(),
        "preds": [np.stack(preds) for preds in zip(*preds_by_row)],
        "sources": sources_by_row,
    }


def numerical_gradient(loss_fn, params, name, index, eps=1e-5):
    """Central difference of loss_fn(params) in one parameter entry.

    The drafter's own predictions are detached in training, so loss_fn must
    hold them fixed (fixed_sources of hass_loss_reference).
    """
    values = []
    for step in (eps, -eps):
        changed = dict(params)
        changed[name] = np.array(params[name], dtype=np.float64)
        changed[name][index] += step
        values.append(float(loss_fn(changed)))
    return (values[0] - values[1]) / (2.0 * eps)
