"""The feature cache: what it holds, what it recomputes, and what it refuses."""

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taps_jax.data.batches import Example
from taps_jax.errors import InputError
from taps_jax.models.llama import Llama, causal_mask
from taps_jax.training import features as features_module
from taps_jax.training.features import OnlineFeatures, cache_features
from tests.tiny import CONFIG, make_verifier_params

WIDTH, LENGTHS = CONFIG.hidden_size, (5, 70, 9, 64, 30)
MODULE = Llama(CONFIG)
# With 64 tokens to a shard, shortest rows first: rows 0, 2, 4 and 3 (108 tokens) make one, row 1 another.
SHARDS = [[0, 2, 4, 3], [1]]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features_module, "_SHARD_TOKENS", 64)


@pytest.fixture(scope="module")
def params() -> dict:
    return make_verifier_params()


@pytest.fixture(scope="module")
def rows() -> list[Example]:
    rng = np.random.default_rng(1)
    return [Example(rng.integers(0, 48, size).astype(np.int32), np.ones(size, bool)) for size in LENGTHS]


@pytest.fixture(scope="module")
def exact(params, rows) -> list[np.ndarray]:
    """The verifier's features of every row, all rows in one batch."""
    return features_of(params, rows)


def features_of(params, rows) -> list[np.ndarray]:
    """Rows are padded to one length, so that one compilation serves every call."""
    tokens = np.ones((5, 80), np.int32)
    for place, row in enumerate(rows):
        tokens[place, : len(row.tokens)] = row.tokens
    out = np.asarray(apply(params, tokens))
    return [out[place, : len(row.tokens)] for place, row in enumerate(rows)]


@jax.jit
def apply(params, tokens):
    return MODULE.apply({"params": params}, tokens, jnp.arange(80)[None], causal_mask(80))[0]


def build(folder, params, rows, fingerprint="verifier", dtype="float16", progress=lambda items, title, total: items):
    return cache_features(folder, MODULE, params, rows, fingerprint, dtype, progress)


def times(folder) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.fixture
def computed(monkeypatch) -> list[list[int]]:
    """The row lengths of every shard computed from now on."""
    calls, compute = [], features_module._compute

    def recorded(module, params, rows):
        calls.append([len(row) for row in rows])
        return compute(module, params, rows)

    monkeypatch.setattr(features_module, "_compute", recorded)
    return calls


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_every_row_has_the_verifiers_features(tmp_path, params, rows, exact, dtype, tolerance):
    cache = build(tmp_path, params, rows, dtype=dtype)
    for index, want in enumerate(exact):
        found = cache.row(index)
        assert found.shape == (LENGTHS[index], WIDTH) and found.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(found.astype(np.float32), want, rtol=tolerance, atol=tolerance)
    sizes = [sum(LENGTHS[row] for row in shard) for shard in SHARDS]
    assert [np.load(path).shape for path in sorted(tmp_path.glob("*.npy"))] == [(size, WIDTH) for size in sizes]


def test_rows_come_in_the_order_asked_for_and_padded_with_zeros(tmp_path, params, rows, exact):
    cache = build(tmp_path, params, rows)
    found = cache(np.array([3, 0, 4]), np.zeros((3, 80), np.int32))
    assert found.shape == (3, 80, WIDTH)
    for got, row in zip(found, (3, 0, 4), strict=True):
        np.testing.assert_allclose(got[: LENGTHS[row]].astype(np.float32), exact[row], rtol=1e-3, atol=1e-3)
        assert not got[LENGTHS[row] :].any()


def test_online_features_are_the_same(params, rows, exact):
    tokens = np.zeros((2, 80), np.int32)
    for place, row in enumerate((1, 2)):
        tokens[place, : LENGTHS[row]] = rows[row].tokens
    found = np.asarray(OnlineFeatures(MODULE, params)(np.array([1, 2]), tokens))
    for got, row in zip(found, (1, 2), strict=True):
        np.testing.assert_allclose(got[: LENGTHS[row]], exact[row], rtol=1e-4, atol=1e-4)


def test_a_second_call_computes_nothing(tmp_path, params, rows, monkeypatch):
    first = build(tmp_path, params, rows)
    before = times(tmp_path)

    def fail(*args):
        raise AssertionError("computed again")

    monkeypatch.setattr(features_module, "_compute", fail)
    told = []
    again = build(tmp_path, params, rows, progress=lambda items, title, total: told.append((title, total)) or items)
    assert told == [("checking features", len(SHARDS))]
    assert times(tmp_path) == before
    for row in range(len(rows)):
        np.testing.assert_array_equal(first.row(row), again.row(row))


def test_a_missing_shard_alone_is_computed(tmp_path, params, rows, exact, computed):
    build(tmp_path, params, rows)
    assert computed == [[LENGTHS[row] for row in shard] for shard in SHARDS]
    before = times(tmp_path)
    (tmp_path / "shard-00001.npy").unlink()
    told = []
    cache = build(tmp_path, params, rows, progress=lambda items, title, total: told.append((title, total)) or items)
    assert computed[2:] == [[70]] and told == [("verifier features", 1), ("checking features", len(SHARDS) - 1)]
    changed = {name for name, time in times(tmp_path).items() if time != before[name]}
    assert changed == {"shard-00001.npy", "shard-00001.crc32"}
    np.testing.assert_allclose(cache.row(1).astype(np.float32), exact[1], rtol=1e-3, atol=1e-3)


def test_an_interrupted_run_keeps_its_complete_shards(tmp_path, params, rows, computed, monkeypatch):
    save = np.save

    def interrupted(file, values):
        file.write(b"half")
        if "00001" in file.name:
            raise KeyboardInterrupt
        file.seek(0)
        save(file, values)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(features_module.np, "save", interrupted)
        build(tmp_path, params, rows)
    assert set(times(tmp_path)) == {"index.json", "shard-00000.npy", "shard-00000.crc32"}
    computed.clear()
    build(tmp_path, params, rows)
    assert computed == [[70]]


def test_a_damaged_shard_is_refused(tmp_path, params, rows, computed):
    build(tmp_path, params, rows)
    shard = tmp_path / "shard-00001.npy"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(InputError, match="shard-00001.npy: damaged, its checksum is .* remove it to have it computed"):
        build(tmp_path, params, rows)
    shard.unlink()
    computed.clear()
    build(tmp_path, params, rows)
    assert computed == [[70]]


@pytest.mark.parametrize("change", ["fingerprint", "dtype", "fewer rows", "other tokens", "other order", "other cut"])
def test_a_cache_of_something_else_is_replaced(tmp_path, params, rows, computed, change):
    build(tmp_path, params, rows)
    (tmp_path / "shard-00009.npy").write_bytes(b"of a longer run")
    computed.clear()
    options, changed = {}, list(rows)
    if change == "fingerprint":
        options["fingerprint"] = "other"
    elif change == "dtype":
        options["dtype"] = "bfloat16"
    elif change == "fewer rows":
        changed.pop()
    elif change == "other tokens":
        changed[2] = Example((rows[2].tokens + 1) % 48, rows[2].supervised)
    elif change == "other order":
        changed.reverse()
    else:  # the same tokens, but one row ends later and the next begins later
        joined = np.concatenate([rows[0].tokens, rows[1].tokens])
        changed[:2] = [Example(part, np.ones(len(part), bool)) for part in (joined[:6], joined[6:])]
    cache = build(tmp_path, params, changed, **options)
    assert len(computed) == len(list(tmp_path.glob("*.npy"))) and sum(map(len, computed)) == len(changed)
    for index, want in enumerate(features_of(params, changed)):
        np.testing.assert_allclose(cache.row(index).astype(np.float32), want, rtol=1e-2, atol=1e-2)


def test_the_index_says_what_the_folder_holds(tmp_path, params, rows):
    build(tmp_path / "deep" / "folder", params, rows)
    index = json.loads((tmp_path / "deep" / "folder" / "index.json").read_text())
    assert {name: index[name] for name in ("dtype", "width", "shards")} == {
        "dtype": "float16",
        "width": WIDTH,
        "shards": SHARDS,
    }


@pytest.mark.parametrize("value", [65600.0, -65600.0])
def test_a_feature_too_large_for_float16_is_refused(tmp_path, params, rows, monkeypatch, value):
    def compute(module, params, rows):
        out = [np.ones((len(row), WIDTH), np.float32) for row in rows]
        out[-1][2, 3] = value
        return out

    monkeypatch.setattr(features_module, "_compute", compute)
    with pytest.raises(InputError, match="shard-00000.npy: a feature exceeds 65504, set features.dtype='bfloat16'"):
        build(tmp_path, params, rows)
    assert set(times(tmp_path)) == {"index.json"}
    found = build(tmp_path, params, rows, dtype="bfloat16").row(SHARDS[0][-1]).astype(np.float32)
    assert found[2, 3] == pytest.approx(value, rel=1e-2) and (found == 1).sum() == found.size - 1


def test_a_full_disk_is_noticed_before_computing(tmp_path, params, rows, computed, monkeypatch):
    usage = collections.namedtuple("Usage", ["total", "used", "free"])
    needed = sum(LENGTHS) * WIDTH * 2
    monkeypatch.setattr(features_module.shutil, "disk_usage", lambda folder: usage(needed, 1, needed - 1))
    with pytest.raises(InputError, match="the feature cache needs .* GB free; set features.source='online'"):
        build(tmp_path, params, rows)
    assert not computed
    monkeypatch.setattr(features_module.shutil, "disk_usage", lambda folder: usage(needed, 0, needed))
    build(tmp_path, params, rows)
    # Only what is missing must fit.
    (tmp_path / "shard-00001.npy").unlink()
    monkeypatch.setattr(features_module.shutil, "disk_usage", lambda folder: usage(needed, 0, 70 * WIDTH * 2))
    build(tmp_path, params, rows)
    assert computed[-1] == [70]
