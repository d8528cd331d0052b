"Each key of the settings has an effect that can be observed. A table, one row per key."
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import keras
import numpy as np
import pytest
import tensorflow as tf

from cheap import HELD
from xtts_nb.train import parts, runs
from xtts_nb.train.finetune import _make_update, _new_rows
from xtts_nb.data.audio import log_mel, synthetic_voice
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.corpora import _Dropped, _check_dropped, read_corpus
from xtts_nb.data.native import BatchPlan, batches_of, CacheReader, _reader_of
from xtts_nb.models.hifigan import Critic, HiFiGAN, SpeakerEncoder
from xtts_nb.models.dvae import DVAE
from xtts_nb.files import write_json
from xtts_nb.models.gpt import GPT
from xtts_nb.models.xtts import _POLICIES
from xtts_nb.train.step import AdamW, averaged, learning_rate, compile_step, Update
from xtts_nb.data.prepare import _choose_mode
from xtts_nb.settings import flat
from xtts_nb.train.runs import new_run, open_cache
from xtts_nb.speech.generate import Speaker, _reference_mels, _sample_code, _speaker_vector
from xtts_nb.train.trainer import _epochs_to_steps, Trainer
from xtts_nb.train.parts import (
    _Bank, _Crops, _DecoderUpdate, Windows, _window_samples)

WAV = synthetic_voice(2.)


# --- observers: (settings, world) -> observation; the same settings give the same --------------------------

def mel(config, world): return log_mel(WAV, config.model.audio.dvae_n_fft, config.model.audio)

def hearing(config):
    "A model whose networks return the mel that they are given."
    gpt = SimpleNamespace(mel_stats=1., conditioning=lambda mel: mel)
    return SimpleNamespace(config=config, gpt=gpt, hifigan=None)

def reference_mel(config, world): return _reference_mels(hearing(config), [WAV], config.speech)

def speaker_mel(config, world):
    model = hearing(config)
    model.hifigan = None, lambda mel: mel
    return _speaker_vector(model, [WAV])

def prompt(config, world):
    speaker = SimpleNamespace(xtts=hearing(config), speech=config.speech)
    speaker.read = partial(Speaker.read, speaker)
    return Speaker.listen(speaker, [WAV, WAV[::-1].copy()]).prompt

def shapes(config, world, make):
    with tf.Graph().as_default(): return [tuple(v.shape) for v in make(config).variables]

dvae_shapes = partial(shapes, make=DVAE)
gpt_shapes = partial(shapes, make=lambda config: GPT(config, 3))
encoder_shapes = partial(shapes, make=SpeakerEncoder)
decoder_shapes = partial(shapes, make=HiFiGAN)
critic_shapes = partial(shapes, make=lambda config: Critic(config.training.decoder))

def sound(config, world):
    "The output of a decoder for two states."
    keras.utils.set_random_seed(0)
    return HiFiGAN(config)(tf.ones((1, 2, config.model.gpt.hidden_dim)),
                           tf.ones((1, config.model.speaker.width)))

def critic_maps(config, world):
    return [[x.shape for x in part] for part in Critic(config.training.decoder)(tf.ones((1, 3000)))]

def rows_to_learn(config, world):
    try: return _new_rows(config, world.tokenizer, ['en'])
    except UserError as e: return str(e)

def updated(config, world):
    "One update of a GPT: losses, applied gradients, number of parts, and how often blocks are recomputed."
    keras.utils.set_random_seed(0)
    gpt, draw = GPT(config, 3, dtype=_POLICIES[config.training.gpt.precision]), np.random.default_rng(0)
    applied, shares = [], []
    update = _make_update(gpt, config.training.gpt, [])
    update.optimizer.apply = lambda gradients, weights: applied.extend(gradients)
    share = update.share
    update.share = lambda batch, *rest: shares.append(len(batch['text'])) or share(batch, *rest)
    batch = {'text': draw.integers(3, 40, (4, 5)), 'codes': draw.integers(0, 32, (4, 6)),
             'text_length': [5] * 4, 'code_length': [6] * 4}
    batch = {name: tf.constant(x, tf.int32) for name, x in batch.items()}
    batch |= {'reference': tf.constant(draw.normal(size=(4, 16, 80)), tf.float32), 'weight': tf.ones(4)}
    with patch.object(tf, 'recompute_grad', wraps=tf.recompute_grad) as again:
        found = update(batch, tf.constant(0))
    return found, applied, shares, again.call_count, gpt.compute_dtype

def planned(config, world):
    "The shapes and the first steps of a plan."
    plan = BatchPlan(world.cache, config.data)
    return plan.shapes, plan.steps_per_epoch, [plan.pick(tf.constant(step, tf.int64)) for step in range(3)]

def first_batch(config, world):
    return _reader_of(BatchPlan(world.cache, config.data))(tf.constant(0, tf.int64))

def pipeline(config, world):
    "Parallel calls, buffer and device of a pipeline, with a fake GPU."
    devices, copied = [], lambda device, n: devices.append(device) or (lambda batches: batches)
    with (patch.object(tf.config, 'list_logical_devices', lambda kind=None: ['GPU:0']),
          patch.object(tf.data.experimental, 'prefetch_to_device', copied)):
        batches = batches_of(lambda step: {'step': step}, config.data, 0, 4)
    return int(batches._buffer_size), int(batches._inputs()[0]._num_parallel_calls), devices

def place(config, world):
    cache = open_cache(world.cache.folder, config)
    reader = CacheReader(cache, BatchPlan(cache, config.data), ('mel',))
    return cache.held, type(reader.rows).__name__

def dropped(config, world):
    try: return _check_dropped([_Dropped('a', 'bad')] * 2, 5, config, 'corpus')
    except UserError as e: return str(e)

def mode(config, world): return _choose_mode(read_corpus(world.corpus)[0], config)

def rates(config, world, training):
    return [float(learning_rate(training(config))(step)) for step in (0, 1, 2, 5, 9, 60)]

gpt_rates = partial(rates, training=lambda config: config.training.gpt)
dvae_rates = partial(rates, training=lambda config: config.training.dvae)
decoder_rates = partial(rates, training=lambda config: config.training.decoder)

def length(config, world): return _epochs_to_steps(config.training.gpt,
                                                   BatchPlan(world.cache, config.data)).steps

def moved(config, world, part='gpt'):
    "A weight and its running mean after three updates."
    x = keras.Variable(np.float32([3., -1.]), name='kernel')
    optimizer = AdamW([x], getattr(config.training, part))
    for n in range(3): optimizer.apply([tf.constant([1., 2.]) * (n + 1)], [x])
    last = x.numpy().copy()
    with averaged(optimizer, [x]): return last, x.numpy().copy()

def compiled(config, world, part='gpt'):
    step = compile_step(tf.identity, getattr(config.training, part))
    return type(step).__name__, getattr(step, 'xla', None)

class Told(Trainer):
    "A trainer with given validation losses, whose updates cost nothing and are bad from the third on."
    def __init__(self, *given, feed=None, **named):
        super().__init__(*given, feed=lambda plan, first, last: iter([{}] * (last - first)), **named)
    def custom_train_step(self, batch, number):
        bad = tf.cast(number >= 3, tf.float32)
        return {'loss': tf.constant(1.), 'skipped': bad, 'bad': bad}
    def validate(self):
        n = self.step // self.training.validate_every
        return {'val_loss': [3., 2., 2.5, 2.2, 4.][n], 'val_dtw': 5. - n}

def told(config, world, folder, part, listener=lambda *given: None):
    "Such a trainer of a part, made as its command makes it; of networks that all share, as no update does."
    nets = world.update.decoder, world.update.encoder
    model = SimpleNamespace(config=config, hifigan=nets, weights={}, save=lambda *given: None, gpt=world.gpt,
                            tokenizer=None)
    few = lambda gpt, training, rows: Update(gpt, training, gpt.trainable_variables[:1])
    if part == 'gpt':
        with patch.multiple(runs, Trainer=Told, Listener=listener, XTTS=lambda *given: model,
                            load_dvae=lambda *given: None, _make_update=few):
            return new_run(world.cache, config, folder, HELD)
    with patch.multiple(parts, Trainer=Told, _Bank=lambda folder: world.bank, DVAE=lambda config: world.dvae,
                        Critic=lambda *given, **named: world.update.critic,
                        AdamW=lambda weights, *given: AdamW(weights[:1], *given)):
        if part == 'dvae': return parts._dvae_trainer(np.ones((200, 80), np.float32), config, folder, 0.5)
        return parts._decoder_trainer(folder, model, {'held_out': ['c'], 'learning_voices': False})

def multiplied(config, world, part='gpt'):
    "Whether a GPU would multiply in TF32 in an update."
    seen, enabled = [], tf.config.experimental.tensor_float_32_execution_enabled
    trainer = told(config, world, world.folder(), part)
    trainer.train_step = lambda batch, number: seen.append(enabled()) or {'loss': tf.constant(1.)}
    trainer.fit(1)
    return seen

def ran(config, world, part='gpt'):
    "The log lines, checkpoints and the best validation of a run, and how it ended."
    folder = world.folder()
    trainer = told(config, world, folder, part)
    try: ended = trainer.fit()['steps']
    except UserError as e: ended = str(e).replace(str(folder), '')
    lines = [line.split(',')[0] for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    return lines, sorted(p.name for p in (folder / 'checkpoints').iterdir()), trainer.best, ended

def listener(config, world): return told(config, world, None, 'gpt', lambda *given: given[3::2]).listen

def crops(config, world):
    mels = np.arange(16_000, dtype=np.float32).reshape(200, 80)
    return _Crops(mels, config)(tf.constant(0, tf.int64))

def windows(config, world): return Windows(world.bank, config)(tf.constant(0, tf.int64))

def window_length(config, world): return _window_samples(config)

def decoder_losses(config, world):
    world.update.training = config.training.decoder
    return world.update.losses(*world.sounds, tf.constant(0))[0]['loss']

def spoken(config, world):
    "The codes that a speaker draws from given scores."
    model = SimpleNamespace(config=config, hifigan=None, gpt=SimpleNamespace(parity=False),
                            dvae=SimpleNamespace(decode=None))
    scores, before = tf.constant(np.random.default_rng(0).normal(size=(64, 40)) * 2,
                                 tf.float32), tf.range(40)[None] % 2 == 0
    uniform = np.random.default_rng(1).random(64, np.float32)
    return _sample_code(scores, before, uniform, Speaker(model).sampling.tensors(64, 1))

def sounding(config, world):
    "A speaker's decoder, always with the same weights."
    keras.utils.set_random_seed(0)
    model = SimpleNamespace(config=config, hifigan=(HiFiGAN(config), None), gpt=SimpleNamespace(parity=False),
                            dvae=SimpleNamespace(decode=None))
    draw = lambda *shape: tf.random.stateless_normal(shape, (0, 0))
    return Speaker(model).decoder(draw(1, 4, config.model.gpt.hidden_dim),
                                  draw(1, config.model.speaker.width))

def qkv(config, world):
    "What a product of a speaker's GPT gives, always with the same weights."
    keras.utils.set_random_seed(0)
    model = SimpleNamespace(config=config, hifigan=None, gpt=GPT(config, 2),
                            dvae=SimpleNamespace(decode=None))
    x = tf.random.stateless_normal((1, 1, config.model.gpt.hidden_dim), (0, 0))
    return Speaker(model).gpt.blocks[0].qkv(x)

def in_time(config, world):
    model = SimpleNamespace(config=config, hifigan=None, gpt=SimpleNamespace(parity=False),
                            dvae=SimpleNamespace(decode=None))
    return Speaker(model)._at_speed(tf.ones((1, 8, 2)))


# --- the table: key -> changed value, observer, settings on both sides --------------------------------------

ADAPTED = {'training.gpt.finetune': 'lora', 'training.gpt.lora_rank': 4}
RUN = {'training.gpt.steps': 8, 'training.gpt.log_every': 2, 'training.gpt.checkpoint_every': 2,
       'training.gpt.validate_every': 2, 'training.gpt.eval_clips': 1, 'training.gpt.mode': 'eager',
       'data.buckets': 1}
RATES = {'training.gpt.steps': 40, 'training.gpt.warmup_steps': 2, 'training.gpt.schedule': 'cosine'}
HEARD = {'data.reference_frames': 120}
DRAWN = {'speech.temperature': 1., 'speech.top_p': 0.95, 'speech.repetition_penalty': 1.5}

TABLE = {
    'model.audio.sample_rate': (16000, mel), 'model.audio.n_mels': (40, mel),
    'model.audio.hop_length': (128, mel),
    'model.audio.win_length': (512, mel), 'model.audio.dvae_n_fft': (2048, mel),
    'model.audio.f_max': (6000., mel),
    'model.audio.reference_n_fft': (4096, reference_mel),
    'model.dvae.hidden': (24, dvae_shapes), 'model.dvae.codebook_dim': (12, dvae_shapes),
    'model.dvae.codes': (48, dvae_shapes), 'model.dvae.resnet_blocks': (2, dvae_shapes),
    'model.gpt.num_layers': (2, gpt_shapes), 'model.gpt.hidden_dim': (128, gpt_shapes),
    'model.gpt.text_tokens': (60, gpt_shapes),
    'model.gpt.max_text_tokens': (30, gpt_shapes), 'model.gpt.max_audio_codes': (30, gpt_shapes),
    'model.gpt.prompt_latents': (6, gpt_shapes), 'model.gpt.conditioning_layers': (2, gpt_shapes),
    'model.gpt.perceiver_layers': (2, gpt_shapes), 'model.gpt.perceiver_heads': (2, gpt_shapes),
    'model.gpt.perceiver_head_dim': (16, gpt_shapes), 'model.gpt.num_heads': (4, updated),
    'model.gpt.dropout': (0.5, updated),
    'model.gpt.code_noise': (0.6, updated),
    'model.gpt.grown_from': (1, rows_to_learn, {'training.gpt.finetune': 'rows'}),
    'model.speaker.sample_rate': (8000, speaker_mel), 'model.speaker.n_fft': (1024, speaker_mel),
    'model.speaker.win_length': (300, speaker_mel), 'model.speaker.hop_length': (80, speaker_mel),
    'model.speaker.n_mels': (32, speaker_mel), 'model.speaker.pre_emphasis': (0.5, speaker_mel),
    'model.speaker.filters': ((8, 12), encoder_shapes), 'model.speaker.blocks': ((1, 2), encoder_shapes),
    'model.speaker.width': (12, encoder_shapes),
    'model.decoder.sample_rate': (48000, window_length), 'model.decoder.channels': (32, decoder_shapes),
    'model.decoder.rates': ((8, 32), sound), 'model.decoder.up_kernels': ((32, 34), decoder_shapes),
    'model.decoder.residual_kernels': ((3, 5), decoder_shapes), 'model.decoder.dilations': ((1, 2), sound),
    'data.batch_size': (2, planned), 'data.min_seconds': (0.9, planned), 'data.max_seconds': (0.9, planned),
    'data.max_text_tokens': (6, planned), 'data.reference_frames': (48, first_batch),
    'data.buckets': (1, planned),
    'data.num_workers': (3, pipeline), 'data.prefetch_buffer_size': (7, pipeline),
    'data.prefetch_to_gpu': (False, pipeline),
    'data.ram_budget': (0., place), 'data.pad_to_fixed_length': (True, planned),
    'data.reference_from': ('clip', planned),
    'data.balance_speakers': (True, planned), 'data.balance_languages': (True, planned),
    'data.seed': (3, planned),
    'data.max_drop_rate': (0.3, dropped), 'data.preprocessing_mode': ('runtime', mode),
    'data.max_cache_gb': (1e-9, mode),
    'training.gpt.steps': (20, gpt_rates, RATES), 'training.gpt.learning_rate': (0.5, gpt_rates, RATES),
    'training.gpt.warmup_steps': (5, gpt_rates, RATES), 'training.gpt.schedule': ('noam', gpt_rates, RATES),
    'training.gpt.epochs': (3, length),
    'training.gpt.finetune': ('lora', updated), 'training.gpt.lora_rank': (8, updated, ADAPTED),
    'training.gpt.lora_alpha': (2., updated, ADAPTED), 'training.gpt.gradient_clip_norm': (1e-3, updated),
    'training.gpt.text_loss_weight': (0.5, updated), 'training.gpt.precision': ('bfloat16', updated),
    'training.gpt.grad_accum_steps': (2, updated), 'training.gpt.gradient_checkpointing': (True, updated),
    'training.gpt.seed': (3, updated),
    'training.gpt.weight_decay': (0.5, moved), 'training.gpt.beta_2': (0.5, moved),
    'training.gpt.ema': (0.5, moved),
    'training.gpt.mode': ('eager', compiled), 'training.gpt.tf32': (True, multiplied),
    'training.gpt.log_every': (3, ran, RUN), 'training.gpt.checkpoint_every': (4, ran, RUN),
    'training.gpt.keep_checkpoints': (1, ran, RUN),
    'training.gpt.validate_every': (4, ran, RUN), 'training.gpt.patience': (1, ran, RUN),
    'training.gpt.judge_by': ('dtw', ran, RUN),
    'training.gpt.max_bad_steps': (2, ran, RUN), 'training.gpt.eval_clips': (2, listener, RUN),
    'training.dvae.steps': (50, dvae_rates), 'training.dvae.learning_rate': (0.5, dvae_rates),
    'training.dvae.batch_size': (3, crops),
    'training.decoder.steps': (7, decoder_rates), 'training.decoder.learning_rate': (0.5, decoder_rates),
    'training.decoder.batch_size': (3, windows),
    'training.decoder.window': (5, windows), 'training.decoder.reference_seconds': (0.6, windows),
    'training.decoder.mel_weight': (1., decoder_losses),
    'training.decoder.adversarial_weight': (9., decoder_losses),
    'training.decoder.feature_weight': (9., decoder_losses),
    'training.decoder.speaker_weight': (9., decoder_losses),
    'training.decoder.adversarial_from': (5, decoder_losses),
    'training.decoder.periods': ((2, 3), critic_shapes), 'training.decoder.windows': ((512,), critic_maps),
    'training.decoder.channels': (4, critic_shapes),
    'speech.temperature': (0., spoken, DRAWN), 'speech.top_k': (2, spoken, DRAWN),
    'speech.top_p': (0.1, spoken, DRAWN),
    'speech.repetition_penalty': (5., spoken, DRAWN), 'speech.speed': (2., in_time),
    'speech.decoder_precision': ('bfloat16', sounding), 'speech.weights': ('int8', qkv),
    'speech.max_reference_seconds': (0.6, prompt, HEARD), 'speech.reference_seconds': (2.6, prompt, HEARD),
    'speech.reference_chunk_seconds': (1., prompt, HEARD),
}

def shared(part: str, drawn) -> dict:
    "The rows of what the DVAE and the decoder have in common with the GPT, in their own section."
    run = {f'training.{part}.{name}': RUN[f'training.gpt.{name}']
           for name in ('steps', 'log_every', 'checkpoint_every', 'validate_every', 'mode')}
    seen = {'compiled': partial(compiled, part=part), 'moved': partial(moved, part=part),
            'multiplied': partial(multiplied, part=part), 'ran': partial(ran, part=part)}
    rows = {name: TABLE[f'training.gpt.{name}'] for name in parts.PartTraining.model_fields
            if name not in ('steps', 'learning_rate', 'seed')}
    return {f'training.{part}.seed': (3, drawn)} | {
        f'training.{part}.{name}': (value, seen[observe.__name__], *([run] if given else []))
        for name, (value, observe, *given) in rows.items()}

TABLE |= shared('dvae', crops) | shared('decoder', windows)
TABLE['training.decoder.weight_decay'] = 0.5, partial(moved, part='decoder')


@pytest.fixture(scope='module')
def base(small) -> XTTSConfig:
    "Small networks, no dropout or noise unless a row asks for it."
    return small.replace(
        model={'gpt': {'num_layers': 1, 'conditioning_layers': 1, 'perceiver_layers': 1, 'code_noise': 0.,
                       'dropout': 0.1}, 'decoder': {'channels': 8, 'rates': [16, 16], 'up_kernels': [32, 32],
                                                    'residual_kernels': [3], 'dilations': [1, 3]},
               'speaker': {'filters': [8, 8], 'blocks': [1, 1], 'width': 8}},
        training={'decoder': {'steps': 8, 'batch_size': 2, 'window': 4, 'periods': [2], 'windows': [256],
                              'channels': 2, 'reference_seconds': 0.5}})

@pytest.fixture(scope='module')
def bank(base, tmp_path_factory) -> _Bank:
    "Noise in the shape of three clips of two speakers."
    folder, draw = tmp_path_factory.mktemp('bank'), np.random.default_rng(0)
    n = np.array([[9] * 3, [12000] * 3, [80] * 3])
    arrays = {'states': draw.normal(size=(27, base.model.gpt.hidden_dim)).astype(np.float16), 'length': n,
              'wav': draw.integers(-999, 999, 36000).astype(np.int16),
              'voice': draw.normal(size=(240, 64)).astype(np.float16), 'speaker': np.array([0, 0, 1]),
              'language': np.zeros(3, int)}
    for name, array in arrays.items(): np.save(folder / f'{name}.npy', array)
    write_json(folder / 'clips.json', {'ids': ['a', 'b', 'c']})
    return _Bank(folder)

@pytest.fixture(scope='module')
def world(base, bank, prepared, corpus, tokenizer, tmp_path_factory) -> SimpleNamespace:
    "What the observers need, made once."
    keras.utils.set_random_seed(0)
    update = _DecoderUpdate(HiFiGAN(base), SpeakerEncoder(base), True, base)
    sounds = [tf.random.stateless_normal((1, 3000), [i, 0], stddev=0.1) for i in (0, 1)]
    return SimpleNamespace(cache=prepared, corpus=corpus, tokenizer=tokenizer, bank=bank, update=update,
                           gpt=GPT(base, 3), dvae=DVAE(base), sounds=sounds, seen={},
                           folder=lambda: tmp_path_factory.mktemp('runs') / 'run')

def changed(config: XTTSConfig, key: str, value) -> XTTSConfig:
    *sections, name = key.split('.')
    inner = {name: value}
    for section in reversed(sections): inner = {section: inner}
    return config.replace(**inner)

def frozen(x):
    "The result of an observer, in a form that can be compared."
    if isinstance(x, dict): return tuple((k, frozen(v)) for k, v in x.items())
    if isinstance(x, (list, tuple)): return tuple(map(frozen, x))
    if isinstance(x, np.ndarray) or tf.is_tensor(x): return x.shape, np.asarray(x).tobytes()
    return repr(x)

def look(key: str, base, world, value=None):
    "The observation, with the key unchanged or changed."
    _, observe, *given = TABLE[key]
    config = base
    for name, each in (given[0] if given else {}).items(): config = changed(config, name, each)
    return frozen(observe(config if value is None else changed(config, key, value), world))

def before(key: str, base, world):
    "The observation with the key unchanged; made once for all rows that share it."
    _, observe, *given = TABLE[key]
    mark = id(observe), str(given)
    if mark not in world.seen: world.seen[mark] = look(key, base, world)
    return world.seen[mark]

@pytest.mark.parametrize('key', TABLE)
def test_a_changed_key_changes_what_is_observed(key, base, world):
    assert look(key, base, world, TABLE[key][0]) != before(key, base, world)

@pytest.mark.parametrize('key',
                         {(id(observe), str(given)): key
                          for key, (_, observe, *given) in TABLE.items()}.values())
def test_what_is_observed_follows_from_the_settings(key, base, world):
    "Two equal runs give the same, so a difference in a row comes from its key."
    assert look(key, base, world) == before(key, base, world)

def test_the_table_has_every_key(): assert set(TABLE) == set(flat(XTTSConfig().model_dump()))
