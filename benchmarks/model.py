"""What masks and losses of XTTS cost row by row and at once, and a forward pass at changing shapes.

    xtts-nb bench model [--record] [--json]     runs it, in a checkout

`losses_speed` times masks and losses of one batch, without the model. `shapes_speed` times the compiled
forward pass over a sequence of batches; every round begins with a new function, so traces and compilations
are timed too."""
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import tensorflow as tf

from xtts_nb.bench import compare, host_syncs, trace_count, wait_for
from xtts_nb.config import XTTSConfig
from xtts_nb.data.native import speech_lengths
from xtts_nb.data.text import TEXT_STOP
from xtts_nb.models.gpt import GPT, _joint_mask, shifted
from xtts_nb.train.step import _cross_entropies, _INPUTS


def speech_batches(
    config: XTTSConfig,
    count: int,
    seed: int = 0,
) -> list[dict]:   # as from `data`
    "Batches of random clips with such lengths, each padded to its longest clip."
    B, F, C = config.data.batch_size, config.data.reference_frames, config.model.audio.n_mels
    draw, batches = np.random.default_rng(seed), []
    for codes, text in zip(*(n.reshape(count, B) for n in speech_lengths(count * B, seed))):
        ids = lambda n, top: tf.constant(draw.integers(3, top, (B, n.max())), tf.int32)
        batches.append({'text': ids(text, config.model.gpt.text_tokens), 'text_length': tf.constant(text),
                        'codes': ids(codes, config.model.dvae.codes), 'code_length': tf.constant(codes),
                        'reference': tf.constant(draw.normal(size=(B, F, C)), tf.float32),
                        'weight': tf.ones(B)})
    return batches


def row_by_row(
    gpt: GPT,
    batch: dict,
    logits: tuple,   # of the GPT, for text and codes
) -> dict:   # inputs text and codes, attention mask (B, L, L), sums and counts of both losses
    "The slow way: one row after the other, with numbers read on the host. A baseline."
    made, sums = {'text': [], 'codes': [], 'mask': []}, {}
    parts = (('text', 'text', logits[0], gpt.text_start, TEXT_STOP),
             ('codes', 'code', logits[1], gpt.code_start, gpt.code_stop))
    add = lambda key, value: sums.update({key: sums.get(key, 0.) + value})
    for i in range(batch['text'].shape[0]):
        weight, n = float(batch['weight'][i]), {}   # a host sync
        for ids, name, scores, start, stop in parts:
            n[ids] = int(batch[f'{name}_length'][i])   # a host sync
            row, free = batch[ids][i, :n[ids]], batch[ids].shape[1] - n[ids]
            made[ids].append(tf.concat([[start], row, tf.fill([free + 1], stop)], 0))
            target = tf.concat([row, [stop]], 0)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(target, scores[i, :n[ids] + 1])
            add(f'{name}_loss', weight * float(tf.reduce_sum(loss)))   # a host sync
            add(f'{name}_count', weight * (n[ids] + 1))
        P, T, S = gpt.cfg.prompt_latents, batch['text'].shape[1] + 2, batch['codes'].shape[1] + 2
        seen = tf.concat([tf.ones(P + n['text'] + 2), tf.zeros(T - n['text'] - 2), tf.ones(S)], 0)
        made['mask'].append(tf.linalg.band_part(tf.ones((P + T + S, P + T + S)), -1, 0) * seen > 0)
    return {name: tf.stack(rows) for name, rows in made.items()} | sums


def host_reads(work: Callable, *arguments) -> int:
    "How many numbers the host fetches from the device during `work`."
    with host_syncs() as reads: work(*arguments)
    return len(reads)


def whole_batch(
    gpt: GPT,
    batch: dict,
    logits: tuple,
) -> dict:   # as from `row_by_row`
    "Inputs, attention mask and losses of all rows at once."
    text, _, _ = shifted(batch['text'], batch['text_length'], gpt.text_start, TEXT_STOP)
    codes, _, _ = shifted(batch['codes'], batch['code_length'], gpt.code_start, gpt.code_stop)
    mask = _joint_mask(gpt.cfg.prompt_latents, text.shape[1], batch['text_length'], codes.shape[1])
    return {'text': text, 'codes': codes, 'mask': mask[:, 0]} | _cross_entropies(gpt, batch, logits)


def compiled_forward(gpt: GPT):   # a function of a batch that returns the logits
    "The forward pass, compiled by XLA; a new function, which knows no shape yet."
    @tf.function(jit_compile=True)
    def forward(batch): return gpt(*(batch[key] for key in _INPUTS))
    return forward


def call_traced(step, batch: dict) -> tuple:   # result, seconds to trace, seconds to compile and compute
    "Call a `tf.function` in two parts, and wait for its result."
    start = time.perf_counter()
    step.get_concrete_function(batch)
    traced = time.perf_counter()
    wait_for(result := step(batch))
    return result, traced - start, time.perf_counter() - traced


def pad_batch(
    batch: dict,
    text: int,     # T
    codes: int,    # S
) -> dict:
    "`batch` with text (B, T) and codes (B, S); the added values do not count."
    widen = lambda ids, n: tf.pad(ids, [[0, 0], [0, n - ids.shape[1]]])
    return batch | {'text': widen(batch['text'], text), 'codes': widen(batch['codes'], codes)}


def longest_shape(batches: list[dict]) -> dict:   # text: T, codes: S
    "A shape that every batch fits into."
    return {key: max(batch[key].shape[1] for batch in batches) for key in ('text', 'codes')}


def losses_speed(
    gpt: GPT,
    batch: dict,
    rounds: int = 5,
    repeats: int = 5,   # in a round
    progress=None,      # called with (done, total)
) -> list[dict]:        # {name, step_ms, ratio, spread, syncs, traces}
    "Masks and losses of one batch: row by row, at once, and at once in a compiled function."
    ways = {'row by row': partial(row_by_row, gpt), 'whole batch': partial(whole_batch, gpt)}
    ways['whole batch, compiled'] = tf.function(ways['whole batch'], jit_compile=True)
    logits = gpt(*(batch[key] for key in _INPUTS))
    def variant(way):
        def run():
            for _ in range(repeats): wait_for(way(batch, logits))
            return repeats
        return run
    variants = {name: variant(way) for name, way in ways.items()}
    rows = compare(variants, 'step_ms', rounds, progress=progress).rows()
    return [row | {'syncs': host_reads(ways[row['name']], batch, logits),
                   'traces': trace_count(ways[row['name']])} for row in rows]


def shapes_speed(
    gpt: GPT,
    batches: list[dict],
    rounds: int = 5,
    progress=None,
) -> list[dict]:   # {name, step_ms, ratio, spread, syncs, traces}
    "A new compiled forward pass over batches with their own shapes and padded to one; traces are timed too."
    traces, padded = {}, [pad_batch(batch, **longest_shape(batches)) for batch in batches]
    def variant(name, some):
        def run():
            forward = compiled_forward(gpt)
            for batch in some: call_traced(forward, batch)
            traces[name] = trace_count(forward)
            return len(some)
        return run
    variants = {name: variant(name, some)
                for name, some in (('changing shapes', batches), ('static shape', padded))}
    rows = compare(variants, 'step_ms', rounds, warmup=0, progress=progress).rows()
    return [row | {'syncs': None, 'traces': traces[row['name']]} for row in rows]


def model_speed(
    batches: int = 12,
    batch_size: int = 16,
    rounds: int = 5,
    progress=None,       # called with (stage, done, total)
) -> list[dict]:         # of `losses_speed`, then of `shapes_speed`
    "Both comparisons with the small GPT of the page on the model."
    config = XTTSConfig.tiny(width=64).replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1}},
                                               data={'batch_size': batch_size})
    gpt, some = GPT(config, text_start=3), speech_batches(config, batches)
    stage = lambda name: progress and partial(progress, name)
    rows = losses_speed(gpt, some[0], rounds, 20, stage('masks and losses'))
    return rows + shapes_speed(gpt, some, rounds, stage('shapes'))
