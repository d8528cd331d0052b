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
from xtts_nb.train.finetune import make_update, new_rows
from xtts_nb.data.audio import log_mel, synthetic_voice
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.corpora import Dropped, check_dropped, read_corpus
from xtts_nb.data.native import BatchPlan, batches_of, CacheReader, _reader_of
from xtts_nb.models.hifigan import Critic, HiFiGAN, SpeakerEncoder
from xtts_nb.models.dvae import DVAE
from xtts_nb.files import write_json
from xtts_nb.models.gpt import GPT
from xtts_nb.models.xtts import POLICIES
from xtts_nb.train.step import AdamW, averaged, learning_rate, compile_step, Update
from xtts_nb.data.prepare import _choose_mode
from xtts_nb.data.text import train_tokenizer
from xtts_nb.settings import flat
from xtts_nb.train.runs import new_run, open_cache
from xtts_nb.speech.generate import Speaker, _reference_mels, _sample_code, _speaker_vector
from xtts_nb.speech.long import _text_pieces
from xtts_nb.train.trainer import _epochs_to_steps, Trainer
from xtts_nb.train.parts import _Bank, _Crops, _DecoderUpdate, Windows, _window_samples

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
    try: return new_rows(config, world.tokenizer, ['en'])
    except UserError as e: return str(e)

def updated(config, world):
    "One update of a GPT: losses, applied gradients, number of parts, and how often blocks are recomputed."
    keras.utils.set_random_seed(0)
    gpt, draw = GPT(config, 3, dtype=POLICIES[config.training.gpt.precision]), np.random.default_rng(0)
    applied, shares = [], []
    update = make_update(gpt, config.training.gpt, [])
    update.optimizer.apply = lambda gradients, weights: applied.extend(gradients)
    share = update.gradients_of
    update.gradients_of = lambda batch, *rest: shares.append(len(batch['text'])) or share(batch, *rest)
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
    return cache.held, type(reader.gather).__name__

def dropped(config, world):
    try: return check_dropped([Dropped('a', 'bad')] * 2, 5, config, 'corpus')
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
                            load_dvae=lambda *given: None, make_update=few):
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

def listener(config, world): return told(config, world, None, 'gpt', lambda *given: given[3::2]).listener

def crops(config, world):
    mels = np.arange(16_000, dtype=np.float32).reshape(200, 80)
    return _Crops(mels, config)(tf.constant(0, tf.int64))

def windows(config, world): return Windows(world.bank, config)(tf.constant(0, tf.int64))

def window_length(config, world): return _window_samples(config)

def decoder_losses(config, world):
    world.update.training = config.training.decoder
    return world.update.losses(*world.sounds, tf.constant(0))[0]['loss']

def speaker(config, **parts):
    "A speaker of a model without networks but those given."
    none = dict(hifigan=None, gpt=SimpleNamespace(parity=False), dvae=SimpleNamespace(decode=None))
    return Speaker(SimpleNamespace(config=config, **none | parts))

def spoken(config, world):
    "The codes that a speaker draws from given scores."
    scores, before = tf.constant(np.random.default_rng(0).normal(size=(64, 40)) * 2,
                                 tf.float32), tf.range(40)[None] % 2 == 0
    uniform = np.random.default_rng(1).random(64, np.float32)
    return _sample_code(scores, before, uniform, speaker(config).sampling.tensors(64, 1))

def sounding(config, world):
    "A speaker's decoder, always with the same weights."
    keras.utils.set_random_seed(0)
    draw = lambda *shape: tf.random.stateless_normal(shape, (0, 0))
    return speaker(config, hifigan=(HiFiGAN(config), None)).decoder(
        draw(1, 4, config.model.gpt.hidden_dim), draw(1, config.model.speaker.width))

def qkv(config, world):
    "What a product of a speaker's GPT gives, always with the same weights."
    keras.utils.set_random_seed(0)
    x = tf.random.stateless_normal((1, 1, config.model.gpt.hidden_dim), (0, 0))
    return speaker(config, gpt=GPT(config, 2)).gpt.blocks[0].qkv(x)

def in_time(config, world): return speaker(config)._at_speed(tf.ones((1, 8, 2)))

def pieces(config, world):
    return _text_pieces(speaker(config, tokenizer=train_tokenizer(['km'], ['en'], 64)), '5 km', 'en')[0]

# --- the table: key -> changed value, observer, settings on both sides --------------------------------------

ADAPTED = {'training.gpt.finetune': 'lora', 'training.gpt.lora_rank': 4}
RUN = {'training.gpt.steps': 8, 'training.gpt.log_every': 2, 'training.gpt.checkpoint_every': 2,
       'training.gpt.validate_every': 2, 'training.gpt.eval_clips': 1, 'training.gpt.mode': 'eager',
       'data.buckets': 1}
RATES = {'training.gpt.steps': 40, 'training.gpt.warmup_steps': 2, 'training.gpt.schedule': 'cosine'}
HEARD = {'data.reference_frames': 120}
DRAWN = {'speech.temperature': 1., 'speech.top_p': 0.95, 'speech.repetition_penalty': 1.5}

def rows(section: str, observe, given=None, **values) -> dict:
    given = [given] if given else []
    return {f'{section}.{name}': (value, observe, *given) for name, value in values.items()}

TABLE = (
    rows('model.audio', mel, sample_rate=16000, n_mels=40, hop_length=128, win_length=512, dvae_n_fft=2048,
         f_max=6000.)
    | rows('model.audio', reference_mel, reference_n_fft=4096)
    | rows('model.dvae', dvae_shapes, hidden=24, codebook_dim=12, codes=48, resnet_blocks=2)
    | rows('model.gpt', gpt_shapes, num_layers=2, hidden_dim=128, text_tokens=60, max_text_tokens=30,
           max_audio_codes=30, prompt_latents=6, conditioning_layers=2, perceiver_layers=2, perceiver_heads=2,
           perceiver_head_dim=16)
    | rows('model.gpt', updated, num_heads=4, dropout=0.5, code_noise=0.6)
    | rows('model.gpt', rows_to_learn, {'training.gpt.finetune': 'rows'}, grown_from=1)
    | rows('model.speaker', speaker_mel, sample_rate=8000, n_fft=1024, win_length=300, hop_length=80,
           n_mels=32, pre_emphasis=0.5)
    | rows('model.speaker', encoder_shapes, filters=(8, 12), blocks=(1, 2), width=12)
    | rows('model.decoder', window_length, sample_rate=48000)
    | rows('model.decoder', decoder_shapes, channels=32, up_kernels=(32, 34), residual_kernels=(3, 5))
    | rows('model.decoder', sound, rates=(8, 32), dilations=(1, 2))
    | rows('data', planned, batch_size=2, min_seconds=0.9, max_seconds=0.9, max_text_tokens=6, buckets=1,
           pad_to_fixed_length=True, reference_from='clip', balance_speakers=True, balance_languages=True,
           seed=3)
    | rows('data', first_batch, reference_frames=48) | rows('data', place, ram_budget=0.)
    | rows('data', pipeline, num_workers=3, prefetch_buffer_size=7, prefetch_to_gpu=False)
    | rows('data', dropped, max_drop_rate=0.3)
    | rows('data', mode, preprocessing_mode='runtime', max_cache_gb=1e-9)
    | rows('training.gpt', gpt_rates, RATES, steps=20, learning_rate=0.5, warmup_steps=5, schedule='constant')
    | rows('training.gpt', length, epochs=3)
    | rows('training.gpt', updated, finetune='lora', gradient_clip_norm=1e-3, text_loss_weight=0.5,
           precision='bfloat16', grad_accum_steps=2, gradient_checkpointing=True, seed=3)
    | rows('training.gpt', updated, ADAPTED, lora_rank=8, lora_alpha=2.)
    | rows('training.gpt', moved, weight_decay=0.5, beta_2=0.5, ema=0.5)
    | rows('training.gpt', compiled, mode='eager') | rows('training.gpt', multiplied, tf32=True)
    | rows('training.gpt', ran, RUN, log_every=3, checkpoint_every=4, keep_checkpoints=1, validate_every=4,
           patience=1, judge_by='dtw', max_bad_steps=2)
    | rows('training.gpt', listener, RUN, eval_clips=2)
    | rows('training.dvae', dvae_rates, steps=50, learning_rate=0.5)
    | rows('training.dvae', crops, batch_size=3)
    | rows('training.decoder', decoder_rates, steps=7, learning_rate=0.5)
    | rows('training.decoder', windows, batch_size=3, window=5, reference_seconds=0.6)
    | rows('training.decoder', decoder_losses, mel_weight=1., adversarial_weight=9., feature_weight=9.,
           speaker_weight=9., adversarial_from=5)
    | rows('training.decoder', critic_shapes, periods=(2, 3), channels=4)
    | rows('training.decoder', critic_maps, windows=(512,))
    | rows('speech', spoken, DRAWN, temperature=0., top_k=2, top_p=0.1, repetition_penalty=5.)
    | rows('speech', in_time, speed=2.) | rows('speech', sounding, decoder_precision='bfloat16')
    | rows('speech', qkv, weights='int8') | rows('speech', pieces, as_written=True)
    | rows('speech', prompt, HEARD, max_reference_seconds=0.6, reference_seconds=2.6,
           reference_chunk_seconds=1.))

def shared(part: str, drawn) -> dict:
    "The rows of what the DVAE and the decoder have in common with the GPT, in their own section."
    run = {f'training.{part}.{name}': RUN[f'training.gpt.{name}']
           for name in ('steps', 'log_every', 'checkpoint_every', 'validate_every', 'mode')}
    seen = {'compiled': partial(compiled, part=part), 'moved': partial(moved, part=part),
            'multiplied': partial(multiplied, part=part), 'ran': partial(ran, part=part)}
    common = {name: TABLE[f'training.gpt.{name}'] for name in parts.PartTraining.model_fields
              if name not in ('steps', 'learning_rate', 'seed')}
    return {f'training.{part}.seed': (3, drawn)} | {
        f'training.{part}.{name}': (value, seen[observe.__name__], *([run] if given else []))
        for name, (value, observe, *given) in common.items()}

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
