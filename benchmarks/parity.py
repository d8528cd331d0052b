"""The same numbers as coqui-tts at every stage of a checkpoint, or the stage where they differ.

    python benchmarks/parity.py COQUI_DIR --coqui-python PYTHON
        --clip FILE        once or more: audio, the first at least 7 s; default: synthetic voices
        --sentences FILE   JSON {language: [sentence, ...]}; default: one sentence for each language
        --json, --record   one JSON object as the last line of stdout; a record in benchmarks/

COQUI_DIR is a folder that coqui-tts 0.28 loads, PYTHON that of an environment that has it. The exit code is 1
if a stage differs, 2 for an error of the user.

Both sides compute with the same inputs. Each stage of ours computes from the result of coqui-tts for the
stage before, so that a row measures one stage only; the last stage is a whole utterance, from recordings
and a sentence to sound, decoded greedily. A difference is relative to the largest value of coqui-tts. Mels
are compared cell by cell in their logarithm, codes by the share that is equal. In the mel of the speaker
encoder, quiet cells show the rounding of the Fourier transform: over 32 recorded clips ours differs from
torch's by up to 4.7e-4, and torch's own float32 differs from its float64 by up to 4.6e-4. The limit of 5e-4
is just above what float32 can reach.

Ids of a text are compared if the vocabulary has the language, otherwise the cleaned text. The tokenizer is
used as in the training of coqui-tts; its inference lower-cases a sentence first, with rules that do not
know Turkish. Sentences that coqui-tts cannot read, as digits in Hindi, have a row of their own: there any
text of ours is right. Our model is loaded with `parity=True`; nbs/models/convert.ipynb lists what that
changes, and shows the newest record.

The functions of the other side run in its environment. Their source is sent there, so they import what they
need and use nothing of this library."""
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import tensorflow as tf  # noqa: E402

from benchmarks.peer import OtherPython, arguments, output, run, start, to_stderr  # noqa: E402
from xtts_nb.config import SpeechConfig, UserError, XTTSConfig  # noqa: E402
from xtts_nb.data.audio import load_audio, log_mel, resample, speaker_log_mel, synthetic_voice  # noqa: E402
from xtts_nb.data.text import Tokenizer, clean_for  # noqa: E402
from xtts_nb.files import read_json  # noqa: E402
from xtts_nb.models.convert import from_coqui  # noqa: E402
from xtts_nb.models.hifigan import _load_hifigan  # noqa: E402
from xtts_nb.models.xtts import XTTS  # noqa: E402
from xtts_nb.speech.generate import faded, Speaker, generate, _reference_mels  # noqa: E402
from xtts_nb.train.step import token_losses  # noqa: E402


# --- text ---------------------------------------------------------------------------------------------------

PARITY_SENTENCES = {
    'en': 'Dr. Brown paid $12.50 for 3 books & left on the 1st of May.',
    'es': 'La Sra. Ruiz pagó 20,15 € por 3 libros y un 5% más.',
    'fr': 'Mme. Petit a payé 12,50 € pour 3 livres & est partie le 1er mai.',
    'de': 'Dr. Weiß zahlt 20 € für 3 Bücher, das sind 5% mehr.',
    'it': 'La sig. Rossi ha pagato 7 € per 3 libri e il 5% in più.',
    'pt': 'A Sra. Lima pagou 20 € por 3 livros e mais 5%.',
    'pl': 'Dr. Nowak kupił 3 książki & zapłacił 20 €.',
    'tr': 'Dr. Kaya 3 kitap aldı & %5 fazla ödedi.',
    'ru': 'Г-н Иванов купил 3 книги & заплатил на 5% больше.',
    'nl': 'Dhr. Visser betaalt 20 € voor 3 boeken & 5% meer.',
    'cs': 'Dr. Novák koupil 3 knihy & zaplatil o 5% více.',
    'ar': 'اشترى الدكتور 3 كتب & دفع 50 ريالا.',
    'zh-cn': '他在2024年买了3本书，花了12.5元。',
    'ja': '彼は本を三冊買いました。',
    'hu': 'Dr. Nagy vett 3 könyvet & 5% felárat fizetett.',
    'ko': '그는 책 3권을 샀습니다.',
    'hi': 'डॉक्टर ने 3 किताबें खरीदीं & घर गए।'}

def read_sentences(path: str | Path | None = None) -> list[tuple[str, str]]:
    "(language, sentence) pairs of a JSON file {language: [sentence, ...]}, or the ones above."
    content = read_json(path) if path else {language: [text] for language, text in PARITY_SENTENCES.items()}
    text = lambda row: row.get('text') if isinstance(row, dict) else row   # a row may hold more than its text
    try: pairs = [(language, text(row)) for language, rows in content.items() for row in rows]
    except (AttributeError, TypeError): pairs = []
    if pairs and all(isinstance(sentence, str) for _, sentence in pairs): return pairs
    raise UserError(f'{path}: holds no sentences; write {{"en": ["A sentence.", ...], ...}}.')


def coqui_text(vocabulary: str, sentences: str) -> str:
    "What coqui-tts makes of [[language, sentence], ...] in JSON: [cleaned text, ids] or null for each."
    import json
    from TTS.tts.layers.xtts.tokenizer import VoiceBpeTokenizer
    tokenizer, readings = VoiceBpeTokenizer(vocabulary), []
    for language, text in json.loads(sentences):
        try:
            cleaned = tokenizer.preprocess_text(text, language.split('-')[0])
            readings.append([cleaned, tokenizer.encode(text, language)])
        except Exception: readings.append(None)
    return json.dumps(readings)

def our_text(
    tokenizer: Tokenizer,
    sentences: list[tuple[str, str]],   # language, sentence
) -> list[tuple]:                       # cleaned text, ids or None
    "Our reading; there are no ids in a language that the vocabulary lacks."
    ids = lambda text, language: tokenizer.encode(text, language) if language in tokenizer.languages else None
    return [(clean_for(text, language, as_trained=True), ids(text, language)) for language,
            text in sentences]


def _text_row(stage: str, pairs: list[tuple]) -> dict:
    "How many sentences differ, and the first of them; `pairs` holds ((language, sentence), equal)."
    wrong = [f'{language}: {text[:40]}' for (language, text), equal in pairs if not equal]
    note = f'{len(pairs) - len(wrong)} of {len(pairs)} sentences' + (f', not {wrong[0]}' if wrong else '')
    return dict(stage=stage, max_abs=float(len(wrong)), max_rel=len(wrong) / len(pairs), ok=not wrong,
                note=note)

def text_parity(
    sentences: list[tuple[str, str]],
    ours: list[tuple],                # from `our_text`
    theirs: list,                     # from `coqui_text`
) -> list[dict]:                      # stage, max_abs and max_rel (sentences that differ), ok, note
    "A row for each group of sentences that is not empty."
    ids, cleaned, unread = stages = ('text ids', 'cleaned text, languages without ids',
                                     'text that coqui-tts cannot read')
    groups = {stage: [] for stage in stages}
    for sentence, (text, tokens), reading in zip(sentences, ours, theirs, strict=True):
        if reading is None: groups[unread].append((sentence, bool(text)))
        elif tokens is None: groups[cleaned].append((sentence, text == reading[0]))
        else: groups[ids].append((sentence, tokens == reading[1]))
    return [_text_row(stage, pairs) for stage, pairs in groups.items() if pairs]


# --- one set of inputs --------------------------------------------------------------------------------------

def make_inputs(
    wavs: list,          # samples (N,) at 22 050 Hz, the first at least 7 s
    text_tokens: int,    # V of the text
    width: int,          # D
    codes: int = 1024,   # V of the codes
    states: int = 30,    # hidden states for the decoder
    seed: int = 0,
) -> dict:
    "Arrays that both sides compute with."
    rng = np.random.default_rng(seed)
    text_length, code_length = np.array([21, 9, 14]), np.array([40, 17, 33])
    text = rng.integers(3, min(text_tokens, 250), (3, 21)) * (np.arange(21) < text_length[:, None])
    return {f'wav_{i}': np.asarray(w, np.float32) for i, w in enumerate(wavs)} | dict(
        text=text, text_length=text_length, codes=rng.integers(0, codes, (3, 40)), code_length=code_length,
        latents=rng.normal(size=(1, states, width)).astype(np.float32))


def utterance_inputs(
    wavs: list,             # samples (N,) at 22 050 Hz, all of one voice
    languages: list[str],   # of the model
    codes: int = 200,       # of the utterance at most
) -> dict:
    "A sentence that both sides speak, and the references."
    language = 'en' if 'en' in languages else languages[0]
    return {f'reference_{i}': np.asarray(w, np.float32) for i, w in enumerate(wavs)} | dict(
        sentence='the old dog sleeps all day in the bay', language=language, most_codes=codes)


# --- the side of coqui-tts ----------------------------------------------------------------------------------

def _coqui_features(model, x, out, torch):
    "Resampling and the three mels, all in log and not yet normalised."
    import torchaudio
    from TTS.tts.layers.tortoise.arch_utils import TorchMelSpectrogram
    from TTS.tts.models.xtts import wav_to_mel_cloning
    for i in range(sum(k.startswith('wav_') for k in x)):
        wav = torch.from_numpy(x[f'wav_{i}'])[None]
        out[f'resampled_{i}'] = low = torchaudio.functional.resample(wav, 22050, 16000)
        out[f'code_mel_{i}'] = TorchMelSpectrogram(mel_norm_file=None, sampling_rate=22050)(wav)
        out[f'reference_mel_{i}'] = wav_to_mel_cloning(
            wav, mel_norms=torch.ones(80), n_fft=2048, hop_length=256, win_length=1024, power=2,
            normalized=False, sample_rate=22050, f_min=0, f_max=8000, n_mels=80)
        encoder = model.hifigan_decoder.speaker_encoder
        out[f'speaker_mel_{i}'] = torch.log(encoder.torch_spec(low) + 1e-6)
        out[f'voice_{i}'] = encoder.forward(low, l2_norm=True)


def _coqui_dvae(folder, x, out, torch):
    "Codes of the first clip's mel, and the mel of codes."
    from TTS.tts.layers.xtts.dvae import DiscreteVAE
    weights = torch.load(folder + '/dvae.pth', weights_only=True)
    stats = torch.load(folder + '/mel_stats.pth', weights_only=True)
    blocks = sum(name.endswith('net.0.weight') for name in weights if name.startswith('encoder'))
    dvae = DiscreteVAE(channels=80, normalization=None, positional_dims=1,
                       num_tokens=weights['codebook.embed'].shape[1],
                       codebook_dim=weights['codebook.embed'].shape[0],
                       hidden_dim=weights['encoder.0.0.weight'].shape[0],
                       num_resnet_blocks=blocks, kernel_size=3, num_layers=2, use_transposed_convs=False)
    dvae.load_state_dict(weights, strict=False)
    dvae.eval()
    mel = out['code_mel_0'] / stats[None, :, None]
    out['dvae_codes'] = dvae.get_codebook_indices(mel[:, :, :mel.shape[-1] // 4 * 4])
    out['dvae_mel'] = dvae.decode(torch.from_numpy(x['codes'][:1]))[0]


def _coqui_gpt(model, x, out, torch):
    "The prompt, both heads and both losses of the batch, and 200 codes from greedy decoding."
    gpt, logits = model.gpt, {}
    mel = out['reference_mel_0'] / model.mel_stats[None, :, None]
    out['conditioning'] = gpt.conditioning_encoder(mel[:, :, :300])
    out['prompt'] = gpt.get_style_emb(mel[:, :, :300])
    out['latents'] = model.get_gpt_cond_latents(torch.from_numpy(x['wav_0'])[None], 22050, length=30,
                                                chunk_length=4)
    for name in ('text', 'mel'):
        head = getattr(gpt, name + '_head')
        head.register_forward_hook(lambda layer, inputs, result, name=name: logits.__setitem__(name, result))
    third = mel.shape[-1] // 3
    crops = torch.cat([mel[:, :, i * third:(i + 1) * third] for i in range(3)])
    losses = gpt(torch.from_numpy(x['text']), torch.from_numpy(x['text_length']),
                 torch.from_numpy(x['codes']), torch.from_numpy(x['code_length']) * 1024,
                 cond_mels=crops[:, None])
    out['text_loss'], out['code_loss'] = losses[:2]
    out['text_logits'], out['code_logits'] = logits['text'], logits['mel']
    for name, penalty in (('plain', 1.0), ('penalised', 5.0)):
        out['greedy_' + name] = gpt.generate(
            gpt.get_style_emb(mel[:, :, :300]).transpose(1, 2), torch.from_numpy(x['text'][:1]),
            do_sample=False, num_beams=1, repetition_penalty=penalty, max_new_tokens=200,
            output_attentions=False)


def _coqui_utterance(model, x, out, torch):
    "The clips as references, as `synthesize` uses them, and a greedy utterance in that voice."
    from TTS.tts.models import xtts
    config = model.config
    xtts.load_audio = lambda name, rate: torch.from_numpy(x[name])[None]   # samples in place of a file
    prompt, voice = model.get_conditioning_latents(
        [name for name in sorted(x) if name.startswith('reference_')], max_ref_length=config.max_ref_len,
        gpt_cond_len=config.gpt_cond_len, gpt_cond_chunk_len=config.gpt_cond_chunk_len)
    result = model.inference(
        str(x['sentence']), str(x['language']), prompt, voice, do_sample=False, top_p=None, top_k=None,
        temperature=None, repetition_penalty=config.repetition_penalty, max_new_tokens=int(x['most_codes']))
    out['utterance_prompt'], out['utterance_voice'] = prompt, voice
    out['utterance_states'], out['utterance_wav'] = (torch.from_numpy(result[k])
                                                     for k in ('gpt_latents', 'wav'))


def _coqui_main(folder, inputs, outputs):
    "All stages of coqui-tts for the arrays in the file `inputs`, as arrays in the file `outputs`."
    import numpy as np
    import torch
    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts
    config = XttsConfig()
    config.load_json(folder + '/config.json')
    model = Xtts.init_from_config(config)
    model.load_checkpoint(config, checkpoint_dir=folder, eval=True, strict=True)
    model.eval()
    x, out = dict(np.load(inputs)), {}
    with torch.inference_mode():
        _coqui_features(model, x, out, torch)
        _coqui_dvae(folder, x, out, torch)
        _coqui_gpt(model, x, out, torch)
        _coqui_utterance(model, x, out, torch)
        out['waveform'] = model.hifigan_decoder(torch.from_numpy(x['latents']), g=out['voice_0'][:, :, None])
    texts = coqui_text(folder + '/vocab.json', str(x['sentences'])) if 'sentences' in x else '[]'
    arrays = {k: v.detach().numpy() for k, v in out.items()}
    np.savez(outputs, texts=texts, mel_stats=model.mel_stats.numpy(), **arrays)
    yield sorted(arrays)


def coqui_outputs(
    coqui_dir: str | Path,     # a folder that coqui-tts loads
    coqui_python: str | Path,  # the Python of an environment with coqui-tts
    inputs: dict,              # from `make_inputs`
) -> dict:                     # {stage: array}
    "What coqui-tts computes, in a process of its own; raises `UserError` with its last error if it fails."
    helpers = coqui_text, _coqui_features, _coqui_dvae, _coqui_gpt, _coqui_utterance
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / f'{name}.npz') for name in ('inputs', 'outputs')}
        np.savez(files['inputs'], **inputs)
        with OtherPython(coqui_python, _coqui_main, *helpers, folder=str(Path(coqui_dir).resolve()),
                  **files) as peer:
            peer()
        with np.load(files['outputs']) as file: return dict(file)


# --- comparing ----------------------------------------------------------------------------------------------

def compare_stage(
    stage: str,
    ours,
    theirs,
    limit: float = 1e-4,   # of the relative difference
) -> dict:                 # stage, max_abs, max_rel, ok
    "One row of the table."
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if ours.shape != theirs.shape:
        note = f'shape {ours.shape}, not {theirs.shape}'
        return dict(stage=stage, max_abs=None, max_rel=None, ok=False, note=note)
    largest = float(np.abs(ours - theirs).max())
    relative = largest / max(float(np.abs(theirs).max()), 1e-12)
    return dict(stage=stage, max_abs=largest, max_rel=relative, ok=bool(relative <= limit))

def compare_mel(stage: str, ours, theirs, share: float = 0.999, limit: float = 5e-4) -> dict:
    "At least `share` of the cells within 1e-4 in the logarithm, and all within `limit`."
    row = compare_stage(stage, ours, theirs)
    if row['max_abs'] is None: return row
    near = float(np.mean(np.abs(np.asarray(ours, np.float64) - theirs) <= 1e-4))
    return row | dict(ok=near >= share and row['max_abs'] <= limit, note=f'{near:.3%} within 1e-4')

def compare_codes(stage: str, ours, theirs, share: float = 1.0) -> dict:
    "At least `share` of the codes are the same."
    row = compare_stage(stage, ours, theirs)
    if row['max_abs'] is None: return row
    same = float(np.mean(np.asarray(ours) == theirs))
    note = f'{same:.2%} of {np.size(theirs)} the same, {len(np.unique(theirs))} different ones'
    return row | dict(ok=same >= share, note=note)


# --- our side -----------------------------------------------------------------------------------------------

def feature_parity(inputs: dict, theirs: dict, config: XTTSConfig) -> list[dict]:
    "Resampling and the mels of all clips."
    audio, rows = config.model.audio, []
    across = lambda mel: np.swapaxes(mel[0], 0, 1)
    for i in range(sum(k.startswith('wav_') for k in inputs)):
        wav = inputs[f'wav_{i}']
        rows += [compare_stage(f'resampling, clip {i}', resample(wav, 22050, 16000),
                               theirs[f'resampled_{i}'][0]),
                 compare_mel(f'mel of the codes, clip {i}', log_mel(wav, audio.dvae_n_fft),
                             across(theirs[f'code_mel_{i}'])),
                 compare_mel(f'mel of the reference, clip {i}', log_mel(wav, audio.reference_n_fft),
                             across(theirs[f'reference_mel_{i}'])),
                 compare_mel(f'mel of the speaker encoder, clip {i}',
                             speaker_log_mel(theirs[f'resampled_{i}'][0]),
                             across(theirs[f'speaker_mel_{i}']))]
    return rows

def dvae_parity(dvae, inputs: dict, theirs: dict) -> list[dict]:
    "Codes, and the mel of codes."
    mel = np.swapaxes(theirs['code_mel_0'], 1, 2)
    codes = dvae.encode(mel[:, :mel.shape[1] // 4 * 4])
    decoded = dvae.decode(tf.constant(inputs['codes'][:1], tf.int32)) / dvae.mel_stats
    return [compare_codes('DVAE codes', codes, theirs['dvae_codes'], 0.999),
            compare_stage('DVAE decoder', decoded, np.swapaxes(theirs['dvae_mel'], 1, 2))]


def gpt_batch(inputs: dict, theirs: dict) -> dict:
    "The batch of coqui-tts as our model takes it."
    mel = np.swapaxes(theirs['reference_mel_0'], 1, 2) / theirs['mel_stats']
    third = mel.shape[1] // 3
    crops = np.concatenate([mel[:, i * third:(i + 1) * third] for i in range(3)])
    as_int = {k: tf.constant(inputs[k], tf.int32) for k in ('text', 'text_length', 'codes', 'code_length')}
    return as_int | dict(reference=tf.constant(crops, tf.float32), weight=tf.ones(len(crops)))

def unpadded(rows, length) -> np.ndarray:
    "The rows without their padding, concatenated."
    return np.concatenate([np.asarray(row)[:n] for row, n in zip(rows, length)])

def gpt_parity(gpt, inputs: dict, theirs: dict) -> list[dict]:
    "The prompt, the logits of both heads without padding, and both losses."
    mel = tf.constant(np.swapaxes(theirs['reference_mel_0'], 1, 2) / theirs['mel_stats'], tf.float32)[:, :300]
    frames = gpt.conditioning.init(mel)
    for block in gpt.conditioning.blocks: frames = block(frames)
    batch = gpt_batch(inputs, theirs)
    logits = gpt(*(batch[k] for k in ('text', 'text_length', 'codes', 'code_length', 'reference')))
    losses = token_losses(gpt, batch)
    rows = [compare_stage('conditioning encoder', frames, np.swapaxes(theirs['conditioning'], 1, 2)),
            compare_stage('perceiver', gpt.conditioning(mel), np.swapaxes(theirs['prompt'], 1, 2))]
    for name, ours, stops in (('text', logits[0], 1), ('code', logits[1], gpt.code_stops)):
        length = inputs[f'{name}_length'] + stops
        loss = losses[f'{name}_loss'] / losses[f'{name}_count']
        rows += [compare_stage(f'{name} logits', unpadded(ours, length),
                               unpadded(theirs[f'{name}_logits'], length)),
                 compare_stage(f'{name} loss', loss, theirs[f'{name}_loss'], 1e-5)]
    return rows


def latents_parity(xtts, inputs: dict, theirs: dict) -> list[dict]:
    "The prompt of a long recording: the mean over its chunks."
    chunks = _reference_mels(xtts, [inputs['wav_0']],
                             SpeechConfig(reference_seconds=30, reference_chunk_seconds=4))
    prompts = [xtts.gpt.conditioning(mel[None]) for mel in chunks]
    return [compare_stage('conditioning latents', tf.reduce_mean(prompts, 0), theirs['latents'])]

def greedy_parity(gpt, inputs: dict, theirs: dict) -> list[dict]:
    "200 codes, the most probable each time, without and with the repetition penalty."
    mel = tf.constant(np.swapaxes(theirs['reference_mel_0'], 1, 2) / theirs['mel_stats'], tf.float32)[:, :300]
    rows = []
    for name, penalty in (('plain', 1.0), ('penalised', 5.0)):
        expected = theirs[f'greedy_{name}'][0]
        run = tf.function(lambda text, mel, penalty=penalty: generate(
            gpt, text, tf.constant([text.shape[1]]), gpt.conditioning(mel), 200, temperature=0,
            repetition_penalty=penalty), jit_compile=True)
        codes = run(tf.constant(inputs['text'][:1], tf.int32), mel)[0].numpy()[0]
        rows.append(compare_codes(f'greedy codes, {name}', codes[:len(expected)], expected))
    return rows

def voice_parity(folder: Path, config: XTTSConfig, inputs: dict, theirs: dict) -> list[dict]:
    "The vector of each voice, and the waveform."
    decoder, encoder = _load_hifigan(folder / 'model.safetensors', config)
    vector = lambda i: encoder(np.swapaxes(theirs[f'speaker_mel_{i}'], 1, 2))
    rows = [compare_stage(f'speaker embedding, clip {i}', vector(i), theirs[f'voice_{i}'])
            for i in range(sum(k.startswith('wav_') for k in inputs))]
    sound = decoder(inputs['latents'], theirs['voice_0'])
    return [*rows, compare_stage('HiFi-GAN waveform', sound, theirs['waveform'].reshape(sound.shape[0], -1))]


def utterance_parity(xtts, inputs: dict, theirs: dict) -> list[dict]:
    "A whole utterance, from the clips and a sentence to sound; no result of coqui-tts goes in."
    per_second = xtts.config.model.audio.frames_per_second / xtts.config.model.dvae.frames_per_code
    speaker = Speaker(xtts, max_seconds=(int(inputs['most_codes']) - 0.5) / per_second, temperature=0)
    voice = speaker.listen([inputs[name] for name in sorted(inputs) if name.startswith('reference_')])
    sound = speaker(str(inputs['sentence']), str(inputs['language']), voice)
    ends = faded(theirs['utterance_wav'], speaker.sample_rate)   # as ours do, without a click
    row = compare_stage('utterance: waveform', sound, np.asarray(ends))
    seconds, codes = len(theirs['utterance_wav']) / speaker.sample_rate, theirs['utterance_states'].shape[1]
    return [compare_stage('utterance: prompt of all clips', voice.prompt[None], theirs['utterance_prompt']),
            compare_stage('utterance: speaker embedding of all clips', voice.vector[None],
                          theirs['utterance_voice'][..., 0]),
            {'note': f'{codes} codes, {seconds:.2f} s'} | row]


# --- all stages ---------------------------------------------------------------------------------------------

def parity(
    coqui_dir: str | Path,         # a folder that coqui-tts loads
    coqui_python: str | Path,      # the Python of an environment with coqui-tts 0.28
    clips: list | None = None,     # audio files, the first at least 7 s; default: synthetic voices
    sentences: str | Path | None = None,   # JSON {language: [sentence, ...]}; default: the ones above
    listen=None,                   # called with a line of text before each part
) -> dict:                         # rows: [{stage, max_abs, max_rel, ok}, ...], ok, model
    "Convert the checkpoint, compute all stages on both sides, and compare them."
    report, texts = listen or (lambda line: None), read_sentences(sentences)
    wavs = [load_audio(c) for c in clips] if clips else [synthetic_voice(9.0), synthetic_voice(2.3, 190)]
    if len(wavs[0]) < 7 * 22050:
        raise UserError(f'{clips[0]}: lasts {len(wavs[0]) / 22050:.1f} s; give a first clip of at least 7 s.')
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / 'model'
        report('convert')
        from_coqui(coqui_dir, folder)
        config = XTTSConfig.load(folder / 'config.yaml')
        gpt = config.model.gpt
        tokenizer = Tokenizer.load(folder / 'tokenizer.json')
        inputs = make_inputs(wavs, gpt.text_tokens, gpt.hidden_dim, config.model.dvae.codes)
        inputs |= utterance_inputs(wavs, tokenizer.languages) | {'sentences': np.array(json.dumps(texts))}
        report('coqui-tts')
        theirs = coqui_outputs(coqui_dir, coqui_python, inputs)
        report('text')
        rows = text_parity(texts, our_text(tokenizer, texts), json.loads(str(theirs['texts'])))
        report('features')
        rows += feature_parity(inputs, theirs, config)
        report('voice')
        voice = voice_parity(folder, config, inputs, theirs)
        report('GPT and DVAE')
        xtts = XTTS.load(folder, parity=True)
        rows += dvae_parity(xtts.dvae, inputs, theirs) + gpt_parity(xtts.gpt, inputs, theirs)
        rows += latents_parity(xtts, inputs, theirs) + voice + greedy_parity(xtts.gpt, inputs, theirs)
        report('utterance')
        rows += utterance_parity(xtts, inputs, theirs)
    return dict(rows=rows, ok=all(r['ok'] for r in rows),
                model=f'GPT of {gpt.num_layers} layers x {gpt.hidden_dim}')


def parity_markdown(result: dict) -> str:
    "The rows of `parity` as a table."
    number = lambda x: '' if x is None else f'{x:.1e}'
    cells = [(r['stage'], number(r['max_abs']), number(r['max_rel']), 'yes' if r['ok'] else 'no',
              r.get('note', ''))
             for r in result['rows']]
    rows = ['| ' + ' | '.join(row) + ' |' for row in cells]
    return '\n'.join(['| stage | largest difference | relative | ok | |', '|---|---|---|---|---|', *rows])


def main() -> int:   # 0, or 1 if a stage differs
    "The command line."
    parser = arguments(__doc__)
    parser.add_argument('coqui_dir', type=Path, help='a folder that coqui-tts loads')
    parser.add_argument('--coqui-python', required=True, help='of an environment with coqui-tts 0.28')
    parser.add_argument('--clip', action='append', help='audio, the first at least 7 s')
    parser.add_argument('--sentences', type=Path, help='JSON {language: [sentence, ...]}')
    given = parser.parse_args()
    start()
    result = parity(given.coqui_dir, given.coqui_python, given.clip, given.sentences, to_stderr)
    ok = result.pop('ok')
    output(given, 'parity', result, parity_markdown(result), ok=ok)
    return 0 if ok else 1


if __name__ == '__main__': run(main)
