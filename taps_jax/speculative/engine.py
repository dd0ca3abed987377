"""The host side of decoding: a queue of requests, B rows, prompts padded to buckets, finished rows refilled."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from taps_jax.errors import InputError
from taps_jax.memory import free_bytes
from taps_jax.speculative.decode import Models, Prompt, StepRecord, Weights, empty_state, insert, run, step
from taps_jax.speculative.sampling import Sampling

PROMPT_BUCKETS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
OnTokens = Callable[[int, tuple[int, ...], bool], None]
OnStep = Callable[[int, StepRecord], None]
# The device loop ends when a row finishes; this bounds how long it may go on without one.
_STEPS_BETWEEN_LOOKS = 64


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
      tokens: the prompt's ids, at least one.
      max_new_tokens: most tokens to generate.
      temperature: 0 is greedy.
      top_p: keep the most probable tokens up to this mass; 1 keeps all.
      top_k: keep this many most probable tokens; 0 keeps all.
      seed: numbers that fix the random stream, such as (seed, question, turn).
    """

    tokens: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of a request.

    Attributes:
      index: of the request, in the order given.
      tokens: generated ids, the stop token included.
      steps: verification steps taken; the first token needs none.
      seconds: from the prompt's insertion until the row was seen finished.
    """

    index: int
    tokens: tuple[int, ...]
    steps: int
    seconds: float


class Engine:
    """Decodes requests with a fixed batch and cache; every prompt bucket and the step compile once.

    Attributes:
      seconds: time spent in `decode` so far, without what its caller does between completions.
    """

    def __init__(
        self,
        models: Models,
        weights: Weights,
        stop_tokens: tuple[int, ...],
        *,
        batch_size: int = 1,
        cache_size: int,
        max_new_tokens: int,
    ):
        """See `cache_size_for` for a sufficient `cache_size`; `max_new_tokens` bounds every request's.

        Raises:
          InputError: the caches need more memory than there is.
        """
        _check_memory(models, weights, batch_size, cache_size, max_new_tokens)
        self._models, self._weights = models, weights
        self._stop = jnp.asarray(stop_tokens, jnp.int32)
        self._batch, self._cache_size, self._max_new_tokens = batch_size, cache_size, max_new_tokens
        self.seconds = 0.0

    def decode(
        self, requests: Iterable[Request], on_tokens: OnTokens | None = None, on_step: OnStep | None = None
    ) -> Iterator[Completion]:
        """Yields completions as rows finish; requests are read from the iterable as rows become free.

        Args:
          requests: prompts with their settings.
          on_tokens: called after every step with each running request's index, its tokens so far, and whether it is
            finished. It costs a look at the device per step.
          on_step: called after every step, before `on_tokens`, with each running request's index and what the step did
            in its row: leaves without the batch axis, on the host. It costs copying trees from the device.

        Raises:
          InputError: a request is empty, asks for no tokens, or does not fit the cache.
        """
        state = empty_state(self._models, self._weights, self._batch, self._cache_size, self._max_new_tokens)
        queue = enumerate(requests)
        running: dict[int, tuple[int, float]] = {}  # row -> request index, start
        exhausted = False
        most_steps = jnp.int32(1 if on_tokens else _STEPS_BETWEEN_LOOKS)
        while True:
            began = time.perf_counter()
            for row in range(self._batch):
                if row in running or exhausted:
                    continue
                index, request = next(queue, (None, None))
                if request is None:
                    exhausted = True
                    break
                running[row] = (index, time.perf_counter())
                prompt = self._prompt(request)
                state = insert(self._models, self._weights, state, jnp.int32(row), prompt, self._stop)
            if not running:
                return
            if on_step:
                stepping = jax.device_get(state.active)  # a row that its prompt's own pass finished takes no step
                state, record = step(self._models, self._weights, state, self._stop)
                record = _on_host(record)
            else:
                state = run(self._models, self._weights, state, self._stop, most_steps)
            active, counts, steps = jax.device_get((state.active, state.count, state.steps))
            now = time.perf_counter()
            self.seconds += now - began
            output = np.asarray(state.output) if on_tokens or not all(active[row] for row in running) else None
            if on_step:
                for row, (index, _) in running.items():
                    if stepping[row]:
                        on_step(index, _of_row(record, row))
            if on_tokens:
                for row, (index, _) in running.items():
                    on_tokens(index, tuple(output[row, : counts[row]].tolist()), not active[row])
            for row in [row for row in running if not active[row]]:
                index, start = running.pop(row)
                yield Completion(index, tuple(output[row, : counts[row]].tolist()), int(steps[row]), now - start)

    def warm_up(self, prompt_lengths: Iterable[int]) -> None:
        """Compiles everything that prompts of these lengths need and starts `seconds` afresh."""
        for bucket in sorted({prompt_bucket(length) for length in prompt_lengths}):
            length = min(bucket, self._cache_size - 2 - self._models.path_length)
            for _ in self.decode([Request((0,) * length, min(2, self._max_new_tokens))]):
                pass
        self.seconds = 0.0

    def _prompt(self, request: Request) -> Prompt:
        length = len(request.tokens)
        if not length or request.max_new_tokens < 1:
            raise InputError(
                f"a request needs a prompt and max_new_tokens >= 1, got {length} tokens and {request.max_new_tokens}"
            )
        most = self._models.verifier.config.max_position_embeddings
        if length + request.max_new_tokens > most:
            raise InputError(
                f"a prompt of {length} tokens with {request.max_new_tokens} new ones exceeds the verifier's "
                f"max_position_embeddings of {most}"
            )
        needed = cache_size_for(length, request.max_new_tokens, self._models.path_length)
        if needed > self._cache_size or request.max_new_tokens > self._max_new_tokens:
            raise InputError(
                f"a prompt of {length} tokens with {request.max_new_tokens} new ones needs a cache of {needed}, "
                f"it holds {self._cache_size} and at most {self._max_new_tokens} new tokens"
            )
        tokens = np.zeros(prompt_bucket(length), np.int32)
        tokens[:length] = request.tokens
        key = jax.random.key(request.seed[0])
        for part in request.seed[1:]:
            key = jax.random.fold_in(key, part)
        sampling = Sampling(jnp.float32(request.temperature), jnp.float32(request.top_p), jnp.int32(request.top_k), key)
        return Prompt(jnp.asarray(tokens), jnp.int32(length), jnp.int32(request.max_new_tokens), sampling)


def engine_factory(
    models: Models, weights: Weights, stop_tokens: tuple[int, ...], *, batch_size: int, max_new_tokens: int
) -> Callable[[int], Engine]:
    """A function from the longest prompt's length to an engine whose cache fits it with `max_new_tokens` more."""

    def make(longest_prompt: int) -> Engine:
        size = cache_size_for(longest_prompt, max_new_tokens, models.path_length)
        return Engine(
            models, weights, stop_tokens, batch_size=batch_size, cache_size=size, max_new_tokens=max_new_tokens
        )

    return make


def _on_host(record: StepRecord) -> StepRecord:
    """Without what is of no use there, the features that the router keeps for its next scores."""
    routing = record.routing and record.routing._replace(output=None)
    return jax.device_get(record._replace(routing=routing))


def _of_row(record: StepRecord, row: int) -> StepRecord:
    routing = record.routing
    if routing:
        routing = routing._replace(score=routing.score[:, row], chosen=routing.chosen[row])
    return jax.tree.map(lambda leaf: leaf[row], record._replace(routing=None))._replace(routing=routing)


def _check_memory(models: Models, weights: Weights, batch: int, cache_size: int, max_new_tokens: int) -> None:
    state = jax.eval_shape(lambda: empty_state(models, weights, batch, cache_size, max_new_tokens))
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    free = free_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"batch_size {batch} with caches of {cache_size} positions needs {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free: lower batch_size, max_new_tokens or the prompts' length"
        )


def prompt_bucket(length: int) -> int:
    """The padded length of a prompt of `length` tokens.

    Raises:
      InputError: it is longer than the largest bucket.
    """
    for bucket in PROMPT_BUCKETS:
        if length <= bucket:
            return bucket
    raise InputError(f"a prompt of {length} tokens exceeds the largest bucket of {PROMPT_BUCKETS[-1]}")


def cache_size_for(prompt_length: int, max_new_tokens: int, path_length: int) -> int:
    """Cache positions that a request needs, in multiples of 64 so that few sizes compile."""
    needed = max(prompt_bucket(prompt_length), prompt_length + max_new_tokens + path_length)
    return -(-needed // 64) * 64
