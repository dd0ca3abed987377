"""Slow reference for the EAGLE-2 draft tree and its verification.

Follows the published EAGLE-2 method: the expansion phase and the reranking
phase of the context-aware dynamic draft tree, greedy tree verification, and
multi-round speculative sampling with point-mass proposals (the tree is a
deterministic function of the prefix).  Plain Python loops over small node
objects, one row at a time, in float64.  An oracle for tests only.
"""

import math

import numpy as np


class _Node:
    """A drafted token with a pointer to the node it continues."""

    def __init__(self, token, parent, log_prob, entropy):
        self.token = token
        self.parent = parent
        self.log_prob = log_prob  # Cumulative from the root.
        self.entropy = entropy  # Of the distribution that generated it.

    def path(self):
        """Drafted tokens from the root's child down to this node."""
        tokens = []
        node = self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))


def _entropy(log_probs):
    """Shannon entropy in nats of a distribution given as log-probs."""
    total = 0.0
    for log_prob in log_probs:
        probability = math.exp(log_prob)
        if probability > 0.0:
            total -= probability * log_prob
    return total


def _draft_children(parent, log_probs, top_k):
    """The top_k best next tokens after parent, best first."""
    log_probs = np.asarray(log_probs, dtype=np.float64).tolist()
    entropy = _entropy(log_probs)
    ranked = sorted(range(len(log_probs)), key=lambda t: (-log_probs[t], t))
    return [_Node(token, parent, parent.log_prob + log_probs[token], entropy) for token in ranked[:top_k]]


def _best_nodes(nodes, count):
    """The count best nodes, best first; of equals the earlier in the list."""
    # sorted() is stable, so equal nodes stay in the order of drafting.
    return sorted(nodes, key=lambda node: -node.log_prob)[:count]


def grow_reference(level1_log_probs, expand, depth, top_k, total_token):
    """Grows the dynamic draft tree of one row.

    Args:
        level1_log_probs: [V] draft log-probs after the root.
        expand: maps a path (tuple of drafted tokens, root excluded) to the
            [V] draft log-probs that follow it.
        depth: number of expansions after the first level.
        top_k: number of beams, and of children of each expanded node.
        total_token: number of nodes to keep, root included.

    Returns:
        List of dicts (token, parent, depth, log_prob, entropy, path) in the
        order of drafting, root first.
    """
    root = _Node(None, None, 0.0, 0.0)
    level = _draft_children(root, level1_log_probs, top_k)
    candidates = list(level)
    for _ in range(depth):
        next_level = []
        for beam in _best_nodes(level, top_k):
            log_probs = expand(beam.path())
            next_level.extend(_draft_children(beam, log_probs, top_k))
        candidates.extend(next_level)
        level = next_level

    chosen = {id(n) for n in _best_nodes(candidates, total_token - 1)}
    kept = [root] + [n for n in candidates if id(n) in chosen]

    index_of = {id(node): index for index, node in enumerate(kept)}
    rows = []
    for node in kept:
        parent = 0
        if node is not root:
            if id(node.parent) not in index_of:
                raise ValueError("a child scores above its parent")
            parent = index_of[id(node.parent)]
        path = node.path()
        rows.append(
            {
                "token": node.token,
                "parent": parent,
                "depth": len(path),
                "log_prob": node.log_prob,
                "entropy": node.entropy,
                "path": path,
            }
        )
    return rows


def _children(nodes, parent):
    """Indices of the children of node `parent`, in node order."""
    return [index for index in range(1, len(nodes)) if nodes[index]["parent"] == parent]


def _token_path(nodes, index):
    """Tokens from the root's child to a node, found by walking up."""
    tokens = []
    while index != 0:
        tokens.append(int(nodes[index]["token"]))
        index = nodes[index]["parent"]
    return tuple(reversed(tokens))


def accept_greedy_reference(nodes, best):
    """Accepts drafted tokens that equal the verifier's argmax.

    Args:
        nodes: tree as returned by grow_reference (several children of a node
            may have the same token).
        best: best[i] is the verifier's argmax token after node i.

    Returns:
        (indices from the root to the last accepted node, bonus token).
    """
    accepted_paths = []
    unfinished = [[0]]
    while unfinished:
        path = unfinished.pop()
        accepted_paths.append(path)
        for child in _children(nodes, path[-1]):
            if int(nodes[child]["token"]) == int(best[path[-1]]):
                unfinished.append(path + [child])
    longest = max(len(path) for path in accepted_paths)
    path = min(
        (path for path in accepted_paths if len(path) == longest),
        key=lambda path: path[-1],
    )
    return path, int(best[path[-1]])


def _draw(distribution, rng):
    """One token from a distribution, by walking its cumulative sum."""
    threshold = rng.random() * float(np.sum(distribution))
    cumulative = 0.0
    last_possible = None
    for token, probability in enumerate(distribution):
        if probability > 0.0:
            last_possible = token
            cumulative += float(probability)
            if threshold < cumulative:
                return token
    return last_possible  # Only reached through rounding.


def _distinct_child_tokens(nodes, prefix):
    """Distinct next tokens of a token prefix in the tree, in node order.

    Children are pooled over all the nodes whose token path is the prefix.
    """
    tokens = []
    for index in range(1, len(nodes)):
        path = _token_path(nodes, index)
        if path[:-1] == prefix and path[-1] not in tokens:
            tokens.append(path[-1])
    return tokens


def _first_node_at(nodes, prefix):
    """Lowest index among the nodes whose token path is the prefix."""
    for index in range(len(nodes)):
        if _token_path(nodes, index) == prefix:
            return index
    raise ValueError("no node has this token path")


def accept_sampling_reference(nodes, probs, rng):
    """Speculative sampling over the tree with point-mass proposals.

    Args:
        nodes: tree as returned by grow_reference.
        probs: probs[i] is the verifier's [V] distribution after node i.
        rng: source of uniforms with a random() method, used in this order:
            one draw per child tried, then one draw for the bonus token.

    Returns:
        (accepted tokens, bonus token).
    """
    prefix = ()
    while True:
        node = _first_node_at(nodes, prefix)
        residual = np.array(probs[node], dtype=np.float64)
        residual = residual / residual.sum()
        accepted = None
        for token in _distinct_child_tokens(nodes, prefix):
            if rng.random() < residual[token]:
                accepted = token
                break
            without = residual.copy()
            without[token] = 0.0
            if without.sum() <= 0.0:
                # Nothing else is possible: a rejection by rounding only.
                accepted = token
                break
            residual = without / without.sum()
        if accepted is None:
            return list(prefix), _draw(residual, rng)
        prefix = prefix + (accepted,)


def expected_acceptance_reference(nodes, probs):
    """Expected number of accepted drafted tokens under exact sampling.

    The sum, over the distinct token paths in the tree, of the product of the
    verifier's probabilities along the path.
    """
    paths = {_token_path(nodes, index) for index in range(1, len(nodes))}
    total = 0.0
    for path in sorted(paths):
        product = 1.0
        for length, token in enumerate(path):
            node = _first_node_at(nodes, path[:length])
            product *= float(probs[node][token])
        total += product
    return total
