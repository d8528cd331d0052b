"""What `xtts-nb corpus` finds: sentences of recordings whose places are known, and faults made in clips.

    python benchmarks/cuts.py
        --corpus DIR      clips in a layout that `prepare` reads; default: the demo's, 3 languages, 6 voices
        --orders N        recordings of each voice, its clips in another order each time; default: 1
        --hours H         instead: the time and memory of one recording of H hours of random words
        --growth H [H ..] instead: those of so many hours of random words in recordings of ten minutes, and
                          of 10 and 1,000 hours with synthetic frames: no search, and clips of 100 Hz
        --json, --record  one JSON object as the last line of stdout; a record in benchmarks/

The clips of a voice are joined, with pauses or without. One sentence of twenty is missing from the text, and
another one from the sound. A cut is right where it lies in the middle of a pause, and at most 0.1 s from the
sound; the sound of a clip begins and ends where it is within 30 dB of its loud parts. A clip has lost a
syllable if its edge is later or earlier by more than 30 ms, or if its first or last 10 ms are loud. Faults:
of 32 clips three lose their end, three have the beginning of another clip behind them, two its end before
them, and two have each other's text."""
import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import soundfile

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.peer import arguments, output, run, start  # noqa: E402
from xtts_nb.app.demo_corpus import _DEMO_SENTENCES, make_corpus  # noqa: E402
from xtts_nb.app.terminal import progress  # noqa: E402
from xtts_nb.app.tune import _run_stage  # noqa: E402
from xtts_nb.config import UserError  # noqa: E402
from xtts_nb.data import align, cut  # noqa: E402
from xtts_nb.data.corpora import read_corpus  # noqa: E402
from xtts_nb.data.cut import check_corpus, cut_corpus  # noqa: E402
from xtts_nb.data.espeak import speak, VOICES  # noqa: E402

PAUSES = {'no pauses': (0.,), '0.2 s': (0.2,), '0 to 0.8 s': (0., 0.2, 0.5, 0.8)}
COUNTED = 'refused', 'sentences', 'found', 'whole', 'absent', 'aligned', 'lost'
NOT_FOUND = 0.05    # of the sentences, on either side
LEAST = 8           # clips of a voice
FAULTS = 'cut', 'cut', 'cut', 'behind', 'behind', 'behind', 'before', 'before', 'text', 'text'   # of 32 clips


class Said(NamedTuple):
    "A sentence in a recording."
    start: float   # s, of its sound
    end: float
    text: str


def levels(wav: np.ndarray, rate: int) -> np.ndarray:   # (T,) dB, of frames of 10 ms
    "Levels of sharp sounds as of others: of the difference of neighbouring samples."
    frame = rate // 100
    sharp = np.diff(wav, prepend=wav[:1])[:len(wav) // frame * frame].reshape(-1, frame)
    return 10 * np.log10((sharp**2).mean(1) + 1e-10)


def edges(wav: np.ndarray, rate: int) -> tuple[float, float]:
    "Where the sound of a clip begins and ends, in s."
    level = levels(wav, rate)
    loud = level > np.percentile(level, 95) - 30
    near = np.convolve(loud, np.ones(19), 'same') >= 5   # what is alone is a click
    loud = np.flatnonzero(loud & near)
    return float(loud[0]) / 100, float(loud[-1] + 1) / 100


def joined(clips: list, path: Path, pauses: tuple[float, ...], rng) -> list[Said]:
    "Write a recording of clips; what is said in it, and where."
    rate = soundfile.info(clips[0].path).samplerate
    parts, said, at = [np.zeros(rate // 5)], [], rate // 5
    for clip in clips:
        wav = soundfile.read(clip.path)[0]
        first, last = edges(wav, rate)
        said.append(Said(at / rate + first, at / rate + last, clip.text.strip()))
        parts += [wav, np.zeros(int(rng.choice(pauses) * rate))]
        at += len(parts[-1]) + len(wav)
    soundfile.write(path, np.concatenate(parts), rate)
    return said


def edge_errors(clip: dict, said: list[Said], inside: list[int]) -> list[tuple[float, bool]]:
    "Of each edge of a clip at that of a sentence: how far it is off (s), and whether sound is lost."
    first, last = said[inside[0]], said[inside[-1]]
    before = said[inside[0] - 1].end if inside[0] else 0.
    after = said[inside[-1] + 1].start if inside[-1] + 1 < len(said) else last.end + 1
    found = []
    if clip['text'].startswith(first.text[:25]):
        right = first.start - min(0.1, (first.start - before) / 2)
        found.append((abs(clip['start'] - right), clip['start'] > first.start + 0.03))
    if clip['text'].endswith(last.text[-25:]):
        right = last.end + min(0.1, (after - last.end) / 2)
        found.append((abs(clip['end'] - right), clip['end'] < last.end - 0.03))
    return found


def loud_ends(path: Path) -> int:
    "How many ends of a clip are loud."
    level = levels(*soundfile.read(path))
    return int((level[[0, -1]] > np.percentile(level, 95) - 20).sum())


def cut_one(clips: list, folder: Path, pauses: tuple[float, ...], rng) -> dict:
    "Join clips of one voice, cut them again, and count."
    order, few = rng.permutation(len(clips)), max(1, round(NOT_FOUND * len(clips)))
    unread, unwritten = set(order[3:3 + few]), set(order[-3 - few:-3])
    said = joined([clips[i] for i in order if i not in unread], folder / 'book.wav', pauses, rng)
    (folder / 'book.txt').write_text('\n\n'.join(clips[i].text for i in order if i not in unwritten),
                                     encoding='utf-8')
    try:
        with patch.object(align, 'sentences', lambda text, language: [text]):   # each clip is one
            result = cut_corpus(folder / 'book.wav', folder / 'book.txt', folder / 'out', clips[0].language)
    except UserError as e:
        if 'no pause' not in str(e): raise
        return {'refused': 1, 'off': []}
    strange, absent = {clips[i].text.strip() for i in unwritten}, {clips[i].text.strip() for i in unread}
    within = [[i for i, s in enumerate(said) if min(s.end, c['end']) - max(s.start, c['start']) > 0.1]
              for c in result['clips']]
    pairs = [p for c, inside in zip(result['clips'], within) if inside for p in edge_errors(c, said, inside)]
    read = [s for s in said if s.text not in strange]
    covered = {said[i].text for inside in within for i in inside}
    return {'refused': 0, 'sentences': len(read),
            'found': sum(s.text not in result['missing'] for s in read),
            'whole': sum(any(s.text in c['text'] for c in result['clips']) for s in read),
            'absent': len(unread) + len(unwritten),
            'aligned': len(strange & covered) + sum(t in c['text'] for c in result['clips'] for t in absent),
            'off': [off for off, _ in pairs],
            'lost': sum(lost for _, lost in pairs) + sum(loud_ends(folder / 'out' / c['file'])
                                                         for c in result['clips'])}


def cut_all(clips: list, orders: int, tell) -> list[dict]:   # rows
    "All voices with each kind of pauses."
    voices = defaultdict(list)
    for clip in clips: voices[clip.language, clip.speaker].append(clip)
    voices = [some for some in voices.values() if len(some) >= LEAST]
    if not voices: raise UserError(f'no voice has {LEAST} clips; give a --corpus with more.')
    rows = []
    jobs = [(name, order, some) for name in PAUSES for order in range(orders) for some in voices]
    found = defaultdict(list)
    for done, (name, order, some) in enumerate(jobs):
        tell('cut', done, len(jobs))
        with tempfile.TemporaryDirectory() as folder:
            one = cut_one(some, Path(folder), PAUSES[name], np.random.default_rng(order))
        found[name].append(one)
    for name, some in found.items():
        total = {key: sum(one.get(key, 0) for one in some) for key in COUNTED}
        off = 1e3 * np.array(sum((one['off'] for one in some), []))
        middle, most = np.percentile(off, (50, 95)).round(1).tolist() if len(off) else (None, None)
        rows.append({'name': name, 'recordings': len(some), **total, 'cuts': len(off), 'cut_ms': middle,
                     'cut_95_ms': most})
    return rows


def plant(clips: list, folder: Path, rng) -> dict[int, str]:   # number of a clip -> its fault
    "Write clips into a corpus, some with a fault."
    (folder / 'wavs').mkdir(parents=True)
    order, faults = rng.permutation(len(clips)), {}
    for block in range(0, len(clips) - 31, 32): faults |= dict(zip(map(int, order[block:block + 32]), FAULTS))
    texts = [clip.text for clip in clips]
    swapped = [i for i, kind in faults.items() if kind == 'text']
    for i, other in zip(swapped[::2], swapped[1::2]): texts[i], texts[other] = texts[other], texts[i]
    wavs, rows = [soundfile.read(clip.path) for clip in clips], []
    for i, (wav, rate) in enumerate(wavs):
        other = wavs[order[(int(np.flatnonzero(order == i)[0]) + 1) % len(clips)]][0]
        first, last = (int(edge * rate) for edge in edges(other, rate))
        more, kind = int(rng.uniform(0.15, 0.4) * rate), faults.get(i)
        if kind == 'cut': wav = wav[:int(rng.uniform(0.4, 0.8) * len(wav))]
        if kind == 'behind': wav = np.concatenate([wav, other[first:first + more]])
        if kind == 'before': wav = np.concatenate([other[last - more:last], wav])
        soundfile.write(folder / 'wavs' / f'{i}.wav', wav, rate)
        rows.append(f'{i}|{texts[i]}|{texts[i]}|{clips[i].speaker}|{clips[i].language}\n')
    (folder / 'metadata.csv').write_text(''.join(rows), encoding='utf-8')
    return faults


def check_all(clips: list, orders: int, tell) -> dict:
    "Faults that are found, and clean clips that are left out."
    row, kinds = defaultdict(int), defaultdict(lambda: np.zeros(2, int))
    number = lambda stretch: int(Path(stretch['source']).stem)
    for order in range(orders):
        tell('check', order, orders)
        with tempfile.TemporaryDirectory() as folder:
            faults = plant(clips, Path(folder) / 'clips', np.random.default_rng(order))
            result = check_corpus(Path(folder) / 'clips', Path(folder) / 'out', 'en')
        left_out = {number(d) for d in result['dropped']}
        named = left_out | {number(c) for c in result['clips'] if 'cut' in c}
        row['faults'] += len(faults)
        row['found'] += len(named & {*faults})
        for i, kind in faults.items(): kinds[kind] += np.array([i in named, 1])
        row['clean'] += len(clips) - len(faults)
        row['clean_left_out'] += len(left_out - {*faults})
    return row | {'kinds': {kind: f'{found} of {made}' for kind, (found, made) in kinds.items()}}


def long_recording(hours: float, path: Path, tell, seed: int = 0) -> tuple[int, list[str]]:
    """Write hours of random words, spoken by two voices, and a text that lacks some sentences and has others;
    how many sentences are in both, and those that nobody says."""
    rng = np.random.default_rng(seed)
    words = sorted({w.strip('.,?!') for t in _DEMO_SENTENCES['en'] for w in t.split()})
    seconds, sentences, text, absent = 0., 0, [], []
    with soundfile.SoundFile(path, 'w', 22050, 1) as file:
        while seconds < 3600 * hours:
            sentence = ' '.join(rng.choice(words, rng.integers(4, 12))).capitalize() + '.'
            chance = rng.random()
            if chance >= NOT_FOUND: text.append(sentence)
            if NOT_FOUND <= chance < 2 * NOT_FOUND:
                absent.append(sentence)
                continue
            wav, rate = speak(sentence, 'en', VOICES[('f4', 'm3')[sentences // 50 % 2]])
            pause = np.zeros(int(rng.choice((0., 0.3, 0.8)) * rate), np.int16)
            for part in (wav, pause): file.write(part)
            seconds, sentences = seconds + (len(wav) + len(pause)) / rate, sentences + 1
            tell('speak', seconds, 3600 * hours)
    path.with_suffix('.txt').write_text('\n\n'.join(text), encoding='utf-8')
    return len(text) - len(absent), absent


def time_hours(hours: float, tell) -> list[dict]:   # rows
    "The command on a long recording: how long it takes, and its memory."
    with tempfile.TemporaryDirectory() as folder:
        sentences, absent = long_recording(hours, Path(folder) / 'long.wav', tell)
        begin = time.perf_counter()
        result = _run_stage(['corpus', f'{folder}/long.wav', '--out', f'{folder}/out'])
        seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    texts = {c['text'] for c in result['clips']}
    return [{'name': f'{hours:g} h', 'minutes': round(seconds / 60, 1), 'peak_gb': round(peak / 1e9, 2),
             'sentences': sentences, 'found': sentences + len(absent) - len(result['missing']),
             'absent': len(absent), 'aligned': sum(any(a in t for t in texts) for a in absent)}]


SYNTHETIC = 10, 1000   # h
MINUTES = 10                # of each recording
EVERY = 5                   # s from sentence to sentence of a synthetic recording


def many(folder: Path, hours: float, first: list[Path]):
    "Hours of recordings with their texts, links to a few."
    folder.mkdir()
    for i in range(round(hours * 60 / MINUTES)):
        for suffix in ('.wav', '.txt'):
            os.link(first[i % len(first)].with_suffix(suffix), folder / f'{i:05d}{suffix}')


def synthetic(source: Path, out: Path):
    "The command without sound: frames, speech and matches are made up, the rest is as always."
    seconds = 60 * MINUTES
    begins = np.arange(0., seconds + 1, EVERY)
    pauses = np.clip(np.stack([begins - 0.2, begins + 0.2], 1), 0, seconds)
    level = np.zeros(int(seconds / align.FRAME) * 4, np.float32)

    def frames(path, progress):
        mel = np.random.rand(len(level) // 4, align._BANDS).astype(np.float32)
        return align.SoundFrames(16000, seconds, mel, level, align._BANDS, pauses)

    def compared(sound, spoken):
        keep = align.speech_frames(sound)[0]
        x = np.concatenate([sound.mel, sound.mel], 1)[keep]
        before = align._pauses_before(sound, keep, pauses)
        starts = np.cumsum([0, *[100] * len(spoken)])
        return (align.Speech(x, align._frame_times(sound)[keep], before, pauses, x[:, 0]),
                align.TextFrames(x[:1], starts, [s.words for s in spoken]))

    def fits(matches, speech, model):
        edge = np.searchsorted(speech.times, begins)
        return [align.Fit(align.Match(i, a, b), 2., np.linspace(0, 99, b - a).astype(int))
                for i, (a, b) in enumerate(pairwise(edge.tolist()))]

    cut.measure_file, cut.comparable, cut.found_sentences = frames, compared, fits
    cut.align = lambda *speech: None
    cut.speak_sentences = lambda sentences, *more: [
        align.SpokenSentence(None, None, [i * 100 // len(s.words) for i in range(len(s.words))])
        for s in sentences]
    cut_corpus(source, None, out, 'en')


def time_growth(hours: list[float], tell) -> list[dict]:   # rows
    "Time and memory of the command in a process of its own."
    rows = []
    for number, kind in [*((h, '') for h in hours), *((h, 'synthetic') for h in SYNTHETIC)]:
        with tempfile.TemporaryDirectory() as home:
            home = Path(home)
            if kind:
                soundfile.write(home / '0.wav', np.zeros(6000 * MINUTES, np.int16), 100)
                (home / '0.txt').write_text(' '.join(
                    f'This is what somebody says as sentence {i}.' for i in range(60 * MINUTES // EVERY)))
            else:
                for i in range(round(min(1, number) * 60 / MINUTES)):
                    long_recording(MINUTES / 60, home / f'{i}.wav', tell, i)
            many(home / 'all', number, sorted(home.glob('*.wav')))
            program = [sys.executable, __file__, '--synthetic'] if kind else [
                sys.executable, '-c', 'from xtts_nb.app.cli import main; main()', 'corpus']
            words = [home / 'all', home / 'out'] if kind else [home / 'all', '--out', home / 'out']
            tell('cut', number, number)
            begin = time.perf_counter()
            child = subprocess.Popen([*program, *words], stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            if status: raise UserError(f'{number:g} hours: the command has failed, as said above.')
            minutes, clips = (time.perf_counter() - begin) / 60, len(read_cuts_lines(home / 'out'))
        cpu = (usage.ru_utime + usage.ru_stime) / 60
        rows.append({'name': f'{number:g} h{" " * bool(kind)}{kind}', 'minutes': round(minutes, 2),
                     'cpu_minutes': round(cpu, 2),
                     'peak_gb': round(usage.ru_maxrss * 1024 / 1e9, 2), 'clips': clips,
                     'ms_a_clip': round(6e4 * cpu / clips, 1)})
    return rows


def read_cuts_lines(folder: Path) -> list[str]:
    return (folder / cut._CUTS).read_text(encoding='utf-8').splitlines()[1:]


def main():
    "The command line."
    parser = arguments(__doc__)
    parser.add_argument('--corpus', type=Path, help='clips; default: those of the demo')
    parser.add_argument('--orders', type=int, default=1, help='recordings of each voice')
    parser.add_argument('--hours', type=float, help='one recording of random words instead')
    parser.add_argument('--growth', type=float, nargs='+', metavar='H', help='hours of many recordings')
    parser.add_argument('--synthetic', type=Path, nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.synthetic: return synthetic(*given.synthetic)
    start()
    with progress() as tell, tempfile.TemporaryDirectory() as folder:
        if given.hours:
            rows = time_hours(given.hours, tell)
            return output(given, 'cuts', {'rows': rows, 'about': 'Random words'}, about='about')
        if given.growth:
            result = {'rows': time_growth(given.growth, tell), 'about': 'Recordings of ten minutes'}
            return output(given, 'cuts_growth', result, about='about')
        corpus = given.corpus or Path(folder) / 'demo'
        if not given.corpus: make_corpus(corpus, progress=partial(tell, 'speak'))
        clips = read_corpus(corpus)[0]
        rows, faults = cut_all(clips, given.orders, tell), check_all(clips, given.orders, tell)
    result = {'rows': rows, 'faults': faults, 'about': f'{len(clips)} clips of {corpus.name}, joined'}
    kinds = ', '.join(f'{kind} {text}' for kind, text in faults['kinds'].items())
    output(given, 'cuts', result, about='about', below=(
        f'Faults made in clips: {faults["found"]} of {faults["faults"]} found ({kinds}); '
        f'{faults["clean_left_out"]} of {faults["clean"]} others left out.'))


if __name__ == '__main__': run(main)
