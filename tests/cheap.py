"Trainers that are quick to run, and what two equal runs have in common."
import json

import numpy as np
import tensorflow as tf

from xtts_nb.data.native import _reader_of
from xtts_nb.files import fingerprint
from xtts_nb.train.trainer import Trainer

HELD = ['low-0', 'low-3', 'high-6']   # held-out clips
# what may differ between two equal runs
CLOCKS = 'clips_per_s', 'au', 'wait_ms', 'copy_ms', 'step_ms', 'callbacks_ms'

_READ = {}   # what a plan is made of -> step -> batch

def read_eagerly(plan, first: int, last: int):
    """The batches of `plan.stream`, whose graph would take longer to trace than a few batches to read.

    A batch is read once for all plans that are alike."""
    reader, cache, clips = _reader_of(plan), plan.cache, plan.members.arrays().numpy().tolist()
    facts = cache.manifest['key'], plan.data.model_dump_json(), plan.fixed, plan.shapes, clips
    known = _READ.setdefault(fingerprint(str(cache.folder), *facts), {})
    for step in range(first, last):
        if step not in known: known[step] = reader(tf.constant(step, tf.int64))
        yield dict(known[step])

class Cheap(Trainer):
    "A trainer whose step is one small, exactly repeatable update, to try the loop around it."
    def __init__(self, *given, feed=None, **named):
        super().__init__(*given, feed=feed or read_eagerly, **named)
        self.evaluate = self.cheap_evaluate

    def compiled_step(self):
        "Op by op: a trace would take longer than all updates."
        return self.custom_train_step

    def cheap_evaluate(self, batch) -> dict:
        total = tf.reduce_sum(tf.cast(batch['clip'], tf.float32) * batch['weight'])
        loss = total + tf.reduce_sum(self.xtts.gpt.final_norm.beta.value)
        count = tf.reduce_sum(batch['weight'])
        return {'text_loss': loss, 'code_loss': loss / 2, 'text_count': count, 'code_count': count}

    def custom_train_step(self, batch, number):
        bias, moment = self.xtts.gpt.final_norm.beta, self.optimizer.variables[-1]
        loss = tf.reduce_mean(tf.cast(batch['clip'], tf.float32)) + tf.reduce_sum(bias.value)
        bias.assign(bias.value * 0.9 + 0.01 * loss + 0.001 * tf.cast(number, tf.float32))
        moment.assign(moment.value + loss)
        self.optimizer.iterations.assign_add(1)
        return {'loss': loss, 'text_loss': loss / 2, 'code_loss': loss / 3, 'gradient_norm': tf.square(loss)}

class Given(Cheap):
    "The same, with given validation losses."
    losses = [3., 2., 2.5, 2., 1., 4., 4., 4.]
    def validate(self): return {'val_loss': self.losses[self.step // self.training.validate_every - 1]}

class Broken(Cheap):
    "Whose losses are not finite at some updates."
    at = ()
    def custom_train_step(self, batch, number):
        bad = tf.reduce_any(tf.equal(number, tf.constant(self.at)))
        before = [tf.identity(v.value) for v in self.xtts.gpt.final_norm.variables]
        losses = super().custom_train_step(batch, number)
        for v, value in zip(self.xtts.gpt.final_norm.variables, before):
            v.assign(tf.where(bad, value, v.value))
        flag = tf.cast(bad, 'float32')
        return {k: tf.where(bad, np.nan, v) for k, v in losses.items()} | {'skipped': flag, 'bad': flag}

def lines_of(run) -> list[dict]:
    "The metrics of a run, without times."
    lines = (run / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]

def summary(result: dict) -> dict: return {k: result[k] for k in ('steps', 'loss_first', 'loss_last')}

def outcome(run) -> dict:
    "What two equal runs have in common to the last bit."
    files = [run / 'model.safetensors', *(run / 'checkpoints').iterdir()]
    return {'metrics': lines_of(run), **{p.name: p.read_bytes() for p in files}}
