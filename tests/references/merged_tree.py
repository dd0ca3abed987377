"""Slow reference for merged trees, on paths instead of arrays.

A specialist's tree is a list of nodes, root first: (parent index, token, cumulative log-probability, entropy).
"""

import math


def paths_of(tree):
    """The path of tokens to every node; the root's is empty."""
    paths = []
    for index, (parent, token, _, _) in enumerate(tree):
        paths.append(() if index == 0 else (*paths[parent], token))
    return paths


def concat_reference(trees):
    """[(path, log_prob, entropy, specialists)] of all drafted nodes, specialist by specialist, equal paths kept."""
    return [
        (path, log_prob, entropy, {number})
        for number, tree in enumerate(trees)
        for path, (_, _, log_prob, entropy) in list(zip(paths_of(tree), tree, strict=True))[1:]
    ]


def trie_reference(trees, most_nodes):
    """[(path, log_prob, entropy, specialists)] of the best `most_nodes` - 1 paths of the union.

    A path is worth what the specialist that likes it best gives it, whose entropy it takes (the first of equals). Of
    paths worth the same the one that appears first is better. The result is in order of appearance.
    """
    union = {}
    for path, log_prob, entropy, specialists in concat_reference(trees):
        best, of_best, proposed = union.get(path, (-math.inf, None, set()))
        if log_prob > best:
            best, of_best = log_prob, entropy
        union[path] = best, of_best, proposed | specialists
    order = {path: place for place, path in enumerate(union)}
    ranked = sorted(union, key=lambda path: (-union[path][0], order[path]))[: most_nodes - 1]
    return [(path, *union[path]) for path in sorted(ranked, key=order.get)]
