"The service: statuses and formats, the order of sound, limits on what clients can use up, an end in order."
import asyncio
import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
import wave
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import soundfile
from fastapi.testclient import TestClient

from xtts_nb.config import UserError
from xtts_nb.data.audio import synthetic_voice
from xtts_nb.data.text import train_tokenizer
from xtts_nb.speech import serve as serving
from xtts_nb.speech.generate import Sampling, Speaker
from xtts_nb.speech.voices import Voice
from xtts_nb.speech.guard import RETRIES
from xtts_nb.speech.serve import (
    check_port, Encoder, FORMATS, Metrics, serve, sound_formats, SPEECH, speech_app, SpeechService,
    VoiceFolder)
from xtts_nb.speech.stream import Engine, EngineClosed
from xtts_nb.speech.voices import load_voice, remove_voice, save_voice, voice_model

RATE, PART = 24000, 2400   # samples of one sound of the toy


class Toy:
    "An engine whose sounds say which text they belong to; it speaks while `go` is set."
    sample_rate, waiting, busy, parts, overdue = RATE, 0, 0, 3, 0.

    def __init__(self, speaker):
        self.speaker, self.rows, self.go = speaker, SimpleNamespace(streams=[None, None]), threading.Event()
        self.submitted, self.error, self.closed, self.failed, self.cured = [], None, False, None, True
        self.go.set()

    def submit(self, text, language, voice, sampling, speed, continues, retries):
        if self.failed: raise EngineClosed('closed')
        self.submitted.append(Said(self, text, (language, voice, sampling.seed, speed)))
        self.submitted[-1].how = continues is not None, retries
        self.submitted[-1].sampling = sampling
        return self.submitted[-1]

    def restart(self):
        if self.cured: self.failed = None

    def close(self): self.closed = True


class Said:
    def __init__(self, engine, text, given):
        self.engine, self.text, self.given = engine, text.strip(), given
        self.codes, self.cancelled, self.started = np.int64(0), threading.Event(), False

    def __iter__(self):
        for i in range(self.engine.parts):
            while not self.engine.go.wait(0.002):
                if self.cancelled.is_set(): return
            if self.engine.error and i >= self.engine.error[0]: raise self.engine.error[1]
            self.started = True
            self.codes += 16
            yield np.full(PART, level(self.text), np.float32)

    def cancel(self): self.cancelled.set()


def level(text): return sum(map(ord, text)) % 97 / 100


@pytest.fixture(scope='module')
def speaker(small):
    "The part of a speaker that knows what can be said."
    tokenizer = train_tokenizer(['Aa bb, cc dd! Ee ff gg hh.'] * 9, ['en'])
    made = SimpleNamespace(xtts=SimpleNamespace(tokenizer=tokenizer, config=small), rates={}, decoder=True,
                           sampling=Sampling(temperature=0.5), speech=SimpleNamespace(speed=1.))
    made._ids = partial(Speaker._ids, made)
    return made

@pytest.fixture
def toy(speaker): return Toy(speaker)

@pytest.fixture
def service(toy): return SpeechService(toy, lambda: {'anna': 'A', 'bert': 'B'}, queue=3, max_characters=70)

@pytest.fixture
def client(service):
    with TestClient(speech_app(service), raise_server_exceptions=False) as client: yield client

LONG = 'Aa bb cc dd ee ff gg.\n\nHh aa bb cc dd ee ff!\n\nGg hh aa bb cc dd'   # three pieces
ASKED = {'input': 'aa bb.', 'voice': 'anna', 'response_format': 'pcm'}

def samples(content): return np.frombuffer(content, '<i2') / 2**15

def until(true, seconds=5.):
    "Wait for a condition."
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, 'it never came'
        time.sleep(0.002)


# --- sound as bytes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', FORMATS)
@pytest.mark.parametrize('rate, whole', [(RATE, False), (22050, False), (22050, True)])
def test_a_format_gives_the_sound_back_at_24_khz(kind, rate, whole):
    wav, writer = 0.4 * synthetic_voice(1., 150.), Encoder(kind, rate, whole=whole)
    parts = [writer.write(part) for part in np.array_split(wav, 3)] + [writer.end()]
    early, data = sum(map(len, parts[:-1])), b''.join(parts)
    assert (early > 0) != whole or kind == 'flac'
    if kind == 'pcm': back, heard = samples(data), RATE
    elif kind == 'aac':
        with serving.av.open(io.BytesIO(data)) as file:
            back = np.concatenate([frame.to_ndarray()[0] for frame in file.decode(audio=0)])
            heard = file.streams.audio[0].rate
    elif kind != 'flac' or whole: back, heard = soundfile.read(io.BytesIO(data))
    else: return
    seconds = len(wav) / rate
    assert heard == RATE and abs(len(back) / RATE - seconds) < (0.002 if kind != 'aac' and whole else 0.12)
    if rate == RATE and kind in ('wav', 'pcm'): np.testing.assert_allclose(back, wav, atol=1e-4)
    assert 0.5 < np.abs(back).max() / np.abs(wav).max() < 1.3

def test_wav_is_read_by_python_and_tells_its_length_where_it_is_known(client, toy):
    for text, known in ((LONG, False), ('aa bb.', True)):
        data = client.post(SPEECH, json=ASKED | {'input': text, 'response_format': 'wav'}).content
        with wave.open(io.BytesIO(data)) as file:
            told, spoken = file.getnframes(), file.readframes(10**9)
        assert len(data) == 44 + len(spoken) and (told == len(spoken) // 2) is known
        assert soundfile.info(io.BytesIO(data)).frames == len(spoken) // 2

def test_opus_at_a_rate_that_it_has_not(client):
    assert {*sound_formats(RATE)} - {*sound_formats(22050)} == {'opus'}
    answer = client.post(SPEECH, json=ASKED | {'response_format': 'opus', 'sample_rate': 22050})
    assert answer.status_code == 400 and answer.json()['error']['param'] == 'response_format'

def test_an_empty_key_is_no_key(toy):
    for key in ('', ' \n'):
        with pytest.raises(UserError, match='The key is empty'): SpeechService(toy, dict, key=key)
    assert SpeechService(toy, dict, key=' a\n').key == 'a' and SpeechService(toy, dict).key is None

def test_the_language_of_a_service(toy):
    assert SpeechService(toy, dict, language='auto').language == 'auto'
    with pytest.raises(UserError, match='no language "ne"; it has en'):
        SpeechService(toy, dict, language='ne')


# --- answers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wrong, status, param, words', [
    ({'input': ''}, 400, None, 'text is empty'), ({'input': ' \n'}, 400, None, 'text is empty'),
    ({'input': 'a' * 71}, 413, 'input', 'limit is 70'), ({'input': None}, 400, 'input', 'Field required.'),
    ({'voice': 'carl'}, 404, 'voice', 'no voice "carl"; there is anna, bert'),
    ({'voice': '../../etc'}, 404, 'voice', 'no voice'), ({'voice': ''}, 404, 'voice', 'no voice'),
    ({'speed': 4.1}, 400, 'speed', 'speed: expected a number from 0.25 to 4, got 4.1.'),
    ({'speed': 0.2}, 400, 'speed', 'from 0.25 to 4, got 0.2.'),
    ({'seed': -1}, 400, 'seed', 'seed: expected a whole number from 0 to 2147483647, got -1.'),
    ({'seed': 2**31}, 400, 'seed', 'got 2147483648.'), ({'seed': 'x' * 99}, 400, 'seed', f'got {"x" * 40}.'),
    ({'temperature': -0.1}, 400, 'temperature', 'expected a number from 0 to 2, got -0.1.'),
    ({'temperature': 2.1}, 400, 'temperature', 'from 0 to 2'), ({'top_k': 0}, 400, 'top_k', 'from 1 to 1024'),
    ({'top_k': 1025}, 400, 'top_k', 'got 1025'), ({'top_p': 1.1}, 400, 'top_p', 'from 0 to 1, got 1.1'),
    ({'top_p': -1}, 400, 'top_p', 'from 0 to 1'),
    ({'repetition_penalty': 0.9}, 400, 'repetition_penalty', 'from 1 to 20, got 0.9.'),
    ({'repetition_penalty': 21}, 400, 'repetition_penalty', 'got 21'), ({'voice': 3}, 400, 'voice', ''),
    ({'language': 'xx'}, 400, None, 'no language "xx"'),
    ({'language': 'e' * 21}, 400, 'language', 'language: '),
    ({'response_format': 'ogg'}, 400, 'response_format', 'aac'), ({'voice': {'name': 'a'}}, 400, 'voice', ''),
    ({'sample_rate': 5}, 400, 'sample_rate', '24000')],
    ids=str)
def test_a_wrong_request(client, toy, wrong, status, param, words):
    answer = client.post(SPEECH, json=ASKED | wrong)
    error = answer.json()['error']
    assert (answer.status_code, error['param']) == (status, param) and words in error['message']
    assert error['type'] == 'invalid_request_error' and set(error) == {'message', 'type', 'param', 'code'}
    assert not toy.submitted

@pytest.mark.parametrize('body', [b'', b'[]', b'{', b'\xff', b'{"input": "\\ud800", "voice": "anna"}',
                                  b'{"input": "aa", "voice": "anna", "speed": NaN}', b'[' * 10000], ids=repr)
def test_a_wrong_body(client, body):
    answer = client.post(SPEECH, content=body)
    assert answer.status_code == 400 and answer.json()['error']['message']

def test_other_paths(client):
    for answer, status in ((client.get('/v1/nothing'), 404), (client.get(SPEECH), 405),
                           (client.get('/v1/models/none'), 404)):
        assert answer.status_code == status and answer.json()['error']['type'] == 'invalid_request_error'
    assert client.get(SPEECH).headers['allow'] == 'POST'
    assert [v['id'] for v in client.get('/v1/audio/voices').json()['voices']] == ['anna', 'bert']
    assert client.get('/v1/audio/voices').json()['languages'] == ['en']
    for path in ('/v1/models', '/v1/models/', '/v1/audio/models'):
        found = client.get(path).json()
        assert found['data'] == found['models'] and found['data'][1]['id'] == 'tts-1'
    assert client.get('/v1/models/tts-1').json()['object'] == 'model'
    assert client.post(SPEECH + '/', json=ASKED).status_code == client.options(SPEECH).status_code == 200
    assert client.get('/health').json() == {'status': 'ok'}
    for path, status in (('/', 200), ('/health', 200), ('/v1/models', 200), (SPEECH, 405), ('/v1/none', 404)):
        assert client.head(path).status_code == status
    schema = client.get('/openapi.json').json()['paths'][SPEECH]['post']
    assert 'input' in schema['requestBody']['content']['application/json']['schema']['required']

def test_the_key(service, client):
    assert client.post(SPEECH, json=ASKED, headers={'Authorization': 'Bearer any'}).status_code == 200
    service.key = 'sécret'
    for given in ('', 'Bearer', 'Bearer wrong', 'Bearer sécre', 'sécret2'):
        answer = client.post(SPEECH, content=b'x' * 9, headers={'Authorization': given.encode('latin-1')})
        assert answer.status_code == 401 and answer.json()['error']['code'] == 'invalid_api_key'
    lists = '/v1/audio/voices', '/v1/audio/models', '/v1/models/tts-1'
    for service.private_lists in (True, False):
        for path in ('/metrics', '/none'): assert client.get(path).status_code == 401
        for path in lists: assert client.get(path).status_code == (401 if service.private_lists else 200)
    for path in ('/', '/health', '/live', '/openapi.json'): assert client.get(path).status_code == 200
    for good in ('Bearer sécret', 'bearer  sécret ', 'sécret'):
        assert client.post(SPEECH, json=ASKED, headers={'Authorization': good.encode()}).status_code == 200

def test_a_large_body_is_not_read(client, monkeypatch):
    monkeypatch.setattr(serving, 'BODY_BYTES', 100)
    read = []
    def body():
        for _ in range(50): read.append(1); yield b'x' * 10
    for content, headers in ((b'x' * 101, {}), (body(), {})):
        answer = client.post(SPEECH, content=content, headers=headers)
        assert answer.status_code == 413 and answer.headers['connection'] == 'close'
    assert client.post(SPEECH, content=b'x' * 100).status_code == 400

def test_pieces_follow_each_other(client, toy, service):
    answer = client.post(SPEECH, json=ASKED | {'input': LONG, 'voice': 'bert', 'seed': 7, 'speed': 2,
                                               'model': 'tts-1', 'instructions': 'x', 'language': 'en'})
    assert answer.status_code == 200 and answer.headers['x-sample-rate'] == '24000'
    assert answer.headers['content-type'] == 'audio/pcm'
    said = toy.submitted
    assert '\n\n'.join(s.text for s in said) == LONG and len(said) == 3
    seeds = [s.given[2] for s in said]
    assert seeds[0] == 7 and len({*seeds}) == 3   # a seed for each piece
    assert {(*s.given[:2], s.given[3]) for s in said} == {('en', 'B', 2.)}
    assert [s.how for s in said] == [(False, None), (True, 2), (True, 2)]
    pause = np.zeros(round(0.7 / 2 * RATE))
    spoken = [np.full(3 * PART, level(s.text)) for s in said]
    expected = np.concatenate([spoken[0], pause, spoken[1], pause, spoken[2]])
    np.testing.assert_allclose(samples(answer.content), expected, atol=1e-4)
    count = service.metrics.registry.get_sample_value
    assert count('xtts_codes_total') == 3 * 48 and count('xtts_sound_seconds_total') == 9 * PART / RATE
    assert not service.open

@pytest.mark.parametrize('name, asked, kind, voice', [
    ('livekit', {'model': 'gpt-4o-mini-tts', 'voice': 'ash', 'response_format': 'mp3', 'speed': 1.0,
                 'instructions': 'calm', 'stream_format': 'sse'}, 'text/event-stream; charset=utf-8', 'B'),
    ('openai', {'model': 'tts-1', 'voice': {'id': 'bert'}}, 'audio/mpeg', 'B'),
    ('pipecat', {'model': 'gpt-4o-mini-tts', 'voice': 'ballad', 'response_format': 'pcm'}, 'audio/pcm', 'A'),
    ('sillytavern', {'model': 'tts-1', 'voice': 'alloy', 'speed': 1}, 'audio/mpeg', 'A'),
    ('home assistant', {'model': 'tts-1-hd', 'voice': 'nova', 'response_format': 'opus'}, 'audio/ogg', 'A'),
    ('no voice', {'response_format': 'aac'}, 'audio/aac', 'A'),
    ('alias', {'voice': 'me'}, 'audio/mpeg', 'B')])
def test_what_real_clients_send(client, toy, service, name, asked, kind, voice):
    service.aliases = {'me': 'bert'}
    answer = client.post(SPEECH, json={'input': 'aa bb.'} | asked)
    assert (answer.status_code, answer.headers['content-type']) == (200, kind)
    assert toy.submitted[0].given[1] == voice
    if name != 'livekit': return
    events = [json.loads(line.removeprefix('data: ')) for line in answer.text.split('\n\n') if line]
    assert [e['type'] for e in events][-2:] == ['speech.audio.delta', 'speech.audio.done']
    mp3 = b''.join(base64.b64decode(e['audio']) for e in events[:-1])
    assert len(soundfile.read(io.BytesIO(mp3))[0]) == 3 * PART and events[-1]['usage']['output_tokens'] == 48

def test_pcm_has_24_khz_whatever_the_model_has(client, toy):
    toy.sample_rate = 22050
    for rate in (None, 16000):
        answer = client.post(SPEECH, json=ASKED | {'sample_rate': rate})
        assert len(answer.content) == pytest.approx(2 * 3 * PART / 22050 * (rate or RATE), abs=4)
        assert answer.headers['x-sample-rate'] == str(rate or RATE)

def test_fields_without_effect_are_listed_once(service):
    lines = []
    client = TestClient(speech_app(service, lines.append))
    for _ in range(2): client.post(SPEECH, json=ASKED | {'model': 'x', 'instructions': 'x', 'a\nb': 1})
    assert [line for line in lines if 'instructions' in line] == lines[:1] and len(lines) == 3
    assert 'a\\nb' in lines[0]

SITE = 'https://chat.example'

@pytest.mark.parametrize('headers, status', [
    ({}, 200), ({'Host': '192.168.1.2:8000'}, 200), ({'Host': '[::1]:80'}, 200), ({'Host': 'tts.local'}, 200),
    ({'Host': 'host.docker.internal:8000'}, 200), ({'Host': 'tts.example'}, 200),
    ({'Host': 'evil.example'}, 403), ({'Host': 'localhost.evil.example:8000'}, 403),
    ({'Host': '1.2.3.4.evil.example'}, 403),
    ({'Origin': SITE}, 403), ({'Origin': 'null'}, 403), ({'Origin': 'http://testserver'}, 200),
    ({'Origin': 'http://testserver.evil.example'}, 403), ({'Origin': 'https://mine.example'}, 200),
    ({'Origin': 'https://proxy.example', 'Sec-Fetch-Site': 'same-origin'}, 200),
    ({'Content-Type': 'text/plain'}, 415), ({'Content-Type': 'text/plain; a=application/json'}, 415),
    ({'Content-Type': 'application/json; charset=utf-8'}, 200)], ids=str)
def test_a_page_of_another_site_cannot_fill_the_places(client, service, headers, status):
    "A browser sends these without a question in advance; a service with a key is safe from them."
    service.hosts, service.origins = {'tts.example'}, ['https://mine.example']
    assert client.post(SPEECH, json=ASKED, headers=headers).status_code == status
    service.key = 'k'
    assert client.post(SPEECH, json=ASKED, headers=headers | {'Authorization': 'Bearer k'}).status_code == 200

@pytest.mark.parametrize('origins, opened', [((), None), ([SITE], SITE), (['https://b.example'], None)])
def test_a_browser_is_told_which_pages_may_speak(toy, origins, opened):
    client = TestClient(speech_app(SpeechService(toy, lambda: {'anna': 'A'}, key='k', origins=origins)))
    asks = {'Origin': SITE, 'Access-Control-Request-Method': 'POST',
            'Access-Control-Request-Headers': 'authorization,content-type'}
    for answer in (client.options(SPEECH, headers=asks),
                   client.post(SPEECH, json=ASKED, headers={'Origin': SITE, 'Authorization': 'Bearer k'})):
        assert answer.headers.get('access-control-allow-origin') == opened

def test_null_is_as_if_the_field_were_not_there(client, toy):
    nothing = dict.fromkeys(('speed', 'seed', 'temperature', 'language', 'response_format', 'top_k'))
    assert client.post(SPEECH, json=nothing | ASKED).status_code == 200

def test_a_full_queue(client, service):
    "Two rows, and three may wait."
    service.open = 4
    assert client.post(SPEECH, json=ASKED).status_code == 200 and service.open == 4
    service.open = 5
    answer = client.post(SPEECH, json=ASKED)
    assert answer.status_code == 429 and answer.headers['retry-after'] == '2'
    assert answer.json()['error']['type'] == 'rate_limit_error'
    service.open = 8
    assert client.post(SPEECH, json=ASKED).headers['retry-after'] == '4'
    assert client.get('/health').status_code == client.get('/v1/models').status_code == 200

@pytest.mark.parametrize('refused', ['key', 'full', 'ends'])
def test_what_is_refused_costs_nothing(service, monkeypatch, refused):
    "No body is read, no folder looked at, no thread used."
    def used(*_, **__): raise AssertionError
    for name in ('run_sync', 'read_request'): monkeypatch.setattr(serving, name, used)
    monkeypatch.setattr('anyio.to_thread.run_sync', used)
    service.voices, sent = used, []
    if refused == 'key': service.key = 'secret'
    if refused == 'full': service.open = 5
    if refused == 'ends': service.ends = 1.
    scope = {'type': 'http', 'method': 'POST', 'path': SPEECH, 'raw_path': SPEECH.encode(), 'headers': [],
             'query_string': b'', 'http_version': '1.1', 'scheme': 'http', 'client': ('1.2.3.4', 5)}
    async def send(message): sent.append(message)
    asyncio.run(speech_app(service)(scope, used, send))
    assert sent[0]['status'] == {'key': 401, 'full': 429, 'ends': 503}[refused]
    assert json.loads(sent[1]['body'])['error']['message']

def test_no_row_within_the_time_limit(client, service, toy):
    service.wait = 0.05
    assert client.post(SPEECH, json=ASKED).status_code == 200
    toy.go.clear()
    answer = client.post(SPEECH, json=ASKED | {'input': LONG})
    error = answer.json()['error']
    assert answer.status_code == 503 and answer.headers['retry-after'] == '1'
    assert (error['type'], error['code']) == ('server_error', 'queue_timeout')
    assert '0.05 s' in error['message']
    assert len(toy.submitted) == 2 and toy.submitted[1].cancelled.is_set() and not service.open

def test_one_line_for_each_request(service, toy):
    lines = []
    client = TestClient(speech_app(service, lines.append), raise_server_exceptions=False)
    client.post(SPEECH, json=ASKED)
    client.post(SPEECH, json=ASKED | {'voice': 'x'})
    client.get('/a%0Ab%20c?key=secret')
    client.get('/health')
    toy.error = 1, RuntimeError('x')
    client.post(SPEECH, json=ASKED)
    time, seconds = r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S+ testclient', r'\d+\.\d{3} s'
    for line, expected in zip(lines, (
            f'{time} POST {SPEECH} 200 {seconds} first sound {seconds} 6 characters',
            f'{time} POST {SPEECH} 404 {seconds} 6 characters', f'{time} GET /a%0Ab%20c 404 {seconds}',
            f'{time} GET /health 200 {seconds}',
            f'{time} POST {SPEECH} 500 {seconds} first sound {seconds} 6 characters'), strict=True):
        assert re.fullmatch(expected, line), line

@pytest.mark.parametrize('error, status', [(EngineClosed('x'), 503), (RuntimeError('x'), 500)], ids=str)
def test_an_engine_that_fails_has_a_status(client, toy, error, status, service):
    toy.error = 0, error
    answer = client.post(SPEECH, json=ASKED | {'response_format': 'wav'})
    assert answer.status_code == status and answer.json()['error']['type'] == 'server_error'
    assert not service.open and service.metrics.statuses() == {status: 1}

def test_while_it_ends(client, service, toy):
    service.ends = time.monotonic() + 9
    assert client.post(SPEECH, json=ASKED).status_code == client.get('/health').status_code == 503
    service.ends, toy.failed = None, RuntimeError('x')   # and nobody restarts it
    assert client.get('/health').json() == {'status': 'failed'}
    assert client.post(SPEECH, json=ASKED).status_code == client.get('/health').status_code == 503

def test_a_call_that_hangs(client, service, toy):
    "The service is not ready at once, and not worth keeping after a minute."
    for toy.overdue, ready, live in ((0., 200, 200), (1., 503, 200), (70., 503, 503)):
        assert (client.get('/health').status_code, client.get('/live').status_code) == (ready, live)
    with served(service, grace=600.) as url:
        toy.go.clear()
        sock = connected(url)
        until(lambda: toy.submitted)
        service.ends = time.monotonic() + 600
        assert received(sock).startswith(b'HTTP/1.1 503')

def test_metrics(client, service):
    for wrong in ({}, {}, {'voice': 'x'}): client.post(SPEECH, json=ASKED | wrong)
    lines = client.get('/metrics').text.splitlines()
    assert not {'xtts_requests_total{status="200"} 2', 'xtts_requests_total{status="404"} 1',
                'xtts_codes_total 96', 'xtts_sound_seconds_total 0.6', 'xtts_first_sound_seconds_count 2',
                'xtts_queue_length 0', 'xtts_rows_busy 0',
                '# TYPE xtts_first_sound_seconds histogram'} - {*lines}
    metrics = Metrics(SimpleNamespace(waiting=7, busy=2))
    for seconds in (0.05, 0.1, 3, 99): metrics.first_sound.observe(seconds)
    counts = re.findall(r'le="(.+)"} (\d)', metrics.text())
    assert ' '.join(f'{edge}:{n}' for edge, n in counts) == (
        '0.1:2 0.2:2 0.5:2 1:2 2:2 5:3 10:3 30:3 60:3 +Inf:4')
    assert {'xtts_first_sound_seconds_sum 102.15', 'xtts_queue_length 7', 'xtts_rows_busy 2'} <= {
        *metrics.text().splitlines()}
    assert {line.split()[2] for line in lines if line.startswith('# TYPE')} == {f'xtts_{name}' for name in (
        'requests_total', 'queue_length', 'rows_busy', 'codes_total', 'sound_seconds_total',
        'first_sound_seconds')}


# --- voices -------------------------------------------------------------------------------------------------

def test_a_folder_of_voices(tmp_path):
    lines, loads = [], []
    def load(path):
        loads.append(path.stem)
        if not path.read_text(): raise UserError(f'{path.name} is damaged')
        return path.read_text()
    for name, text in (('a', '1'), ('b', ''), ('c', '3')): (tmp_path / f'{name}.safetensors').write_text(text)
    (tmp_path / 'd.txt').write_text('4')
    voices = VoiceFolder(tmp_path, load, lines.append)
    assert voices() == {'a': '1', 'c': '3'} and lines == ['b.safetensors is damaged']
    (tmp_path / 'a.safetensors').write_text('5')
    os.utime(tmp_path / 'a.safetensors', (1, 1))
    (tmp_path / 'c.safetensors').unlink()
    assert voices() == {'a': '5'} and len(lines) == 1 and loads == ['a', 'b', 'c', 'a']
    with pytest.raises(UserError, match='is no such folder of voices'): VoiceFolder(tmp_path / 'none', load)

def test_a_voice_is_another_when_its_file_is_even_if_the_time_is_not(tmp_path):
    voices, path, other = VoiceFolder(tmp_path, Path.read_text), tmp_path / 'a.safetensors', tmp_path / 'b'
    for text, place in (('12', path), ('123', path), ('456', other)):
        place.write_text(text)
        os.utime(place, (1, 1))
        if place is other: other.replace(path)   # as long, and as old
        assert voices() == {'a': text}

def test_a_voice_that_nobody_can_ask_for(tmp_path, service):
    "A name that is not UTF-8 would break each list of names."
    lines = []
    for name in (b'\xff', b'good'): (tmp_path / os.fsdecode(name + b'.safetensors')).touch()
    service.voices = VoiceFolder(tmp_path, str, lines.append)
    client = TestClient(speech_app(service), raise_server_exceptions=False)
    assert [v['id'] for v in client.get('/v1/audio/voices').json()['voices']] == ['good']
    assert client.post(SPEECH, json=ASKED).status_code == 404 and len(lines) == 1

def test_threads_read_a_new_voice_once(tmp_path):
    loads = []
    def load(path): time.sleep(0.05); loads.append(path); return 1
    (tmp_path / 'a.safetensors').touch()
    voices = VoiceFolder(tmp_path, load)
    with ThreadPoolExecutor(8) as pool: assert [*pool.map(lambda _: voices(), range(8))] == [{'a': 1}] * 8
    assert len(loads) == 1

def test_voices_are_edited_while_the_service_runs(toy, singer, tmp_path):
    "By the commands of this library, and by hands."
    reports, load = [], lambda path: load_voice(path, singer.xtts, model)
    model, low = voice_model(singer.xtts), Voice(np.zeros((4, 64)), np.zeros(32))
    path = tmp_path / 'anna.safetensors'
    service = SpeechService(toy, VoiceFolder(tmp_path, load, reports.append))
    client = TestClient(speech_app(service))
    def spoken(): return client.post(SPEECH, json=ASKED).status_code, len(reports)
    assert spoken() == (404, 0)
    save_voice(path, low, model, [])
    assert spoken() == (200, 0) and toy.submitted[-1].given[1].vector.numpy().max() == 0
    save_voice(path, Voice(np.zeros((4, 64)), np.ones(32)), model, [])
    assert spoken() == (200, 0) and toy.submitted[-1].given[1].vector.numpy().max() == 1
    whole = path.read_bytes()
    for n, damaged in enumerate((b'', whole[:-9], whole[:50], b'\xff' * len(whole)), 1):
        path.write_bytes(damaged)
        assert spoken() == (404, n) == spoken()   # said once
    save_voice(path, low, 'another', [])
    assert spoken() == (404, 5) and 'other encoders' in reports[-1]
    save_voice(path, low, model, [])
    assert spoken() == (200, 5)
    remove_voice(tmp_path, 'anna')
    assert spoken() == (404, 5)
    path.mkdir()
    assert spoken() == (404, 6)


# --- a real server ------------------------------------------------------------------------------------------

@contextmanager
def served(service, **settings):
    "The service on a free port, in a thread; its address."
    address, ready = [], threading.Event()
    def note(url): address.append(url); ready.set()
    thread = threading.Thread(target=serve, args=[service], daemon=True,
                              kwargs={'port': 0, 'ready': note, 'grace': 0.1} | settings)
    thread.start()
    assert ready.wait(10)
    try: yield address[0]
    finally:
        service.ends = time.monotonic()
        thread.join(10)
        assert not thread.is_alive() and not service.open

def connected(url, text=None, **asked):
    "A socket that has sent a request, or the bytes of `text`."
    host, port = url.removeprefix('http://').split(':')
    sock, body = socket.create_connection((host, int(port)), timeout=5), json.dumps(ASKED | asked)
    sock.sendall((f'POST {SPEECH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}'
                  if text is None else text).encode())
    return sock

def test_sound_is_sent_while_it_is_made_and_others_do_not_wait(service, toy):
    with served(service) as url, httpx.Client(base_url=url) as http:
        toy.parts = 10**9
        with http.stream('POST', SPEECH, json=ASKED) as endless:
            parts = endless.iter_bytes()
            first = next(parts)
            assert samples(first)[0] == pytest.approx(level('aa bb.'), abs=1e-4)
            toy.parts = 1
            assert len(http.post(SPEECH, json=ASKED | {'input': 'cc dd'}).content) == 2 * PART
            until(lambda: service.open == 1)
            assert not toy.submitted[0].cancelled.is_set()
        until(toy.submitted[0].cancelled.is_set)   # the client closed the connection
        until(lambda: not service.open)

def test_a_client_that_goes_away_before_the_first_sound(service, toy):
    with served(service) as url:
        toy.go.clear()
        sock = connected(url, input=LONG)
        until(lambda: toy.submitted)
        sock.close()
        until(lambda: all(s.cancelled.is_set() for s in toy.submitted) and not service.open)
        until(lambda: service.metrics.statuses() == {499: 1})

def test_a_client_that_does_not_read_is_given_up(service, toy):
    with served(service, stall_seconds=0.1) as url:
        toy.parts = 10**9
        sock = connected(url)
        until(lambda: toy.submitted and toy.submitted[0].cancelled.is_set() and not service.open, 20)
        with suppress(ConnectionResetError):
            while sock.recv(2**20): pass

def test_a_steady_reader_is_not_cut_off(service, toy, monkeypatch):
    "One piece is one large write; it takes much longer than a client may take nothing."
    monkeypatch.setattr(Said, '__iter__', lambda self: iter([np.zeros(4_000_000, np.float32)]))
    with served(service, stall_seconds=0.4) as url:
        sock, got = connected(url), 0
        while got < 8_000_000:
            assert (part := sock.recv(2**17)), f'cut off after {got} bytes'
            got += len(part)
            time.sleep(0.03)
        sock.close()

def test_a_failure_in_the_middle_breaks_the_answer(service, toy):
    toy.error = 1, RuntimeError('x')
    with served(service) as url, pytest.raises(httpx.RemoteProtocolError):
        httpx.post(url + SPEECH, json=ASKED)

def test_a_body_that_does_not_come(service, monkeypatch):
    monkeypatch.setattr(serving, 'REQUEST_SECONDS', 0.1)
    with served(service) as url:
        head = f'POST {SPEECH} HTTP/1.1\r\nHost: x\r\nContent-Length: '
        assert connected(url, head + '9\r\n\r\n{').recv(99).startswith(b'HTTP/1.1 408')
        huge = connected(url, head + f'{2**30}\r\n\r\n')
        assert huge.recv(99).startswith(b'HTTP/1.1 413')
        until(lambda: huge.recv(999) == b'')   # closed by the server

def error_of(answer: bytes) -> dict:
    "The error that an answer holds."
    head, _, body = answer.partition(b'\r\n\r\n')
    assert b'application/json' in head.lower()
    return json.loads(body)['error']

def received(sock) -> bytes:
    "All that comes until the server closes the connection."
    parts = []
    with suppress(ConnectionResetError):
        while part := sock.recv(2**16): parts.append(part)
    return b''.join(parts)

def test_what_is_no_http_gets_an_error_of_the_same_form(service):
    with served(service) as url:
        for text in ('xx\r\n\r\n', 'GET / HTTP/1.1\r\n\r\n', f'GET /{"a" * 70000} HTTP/1.1\r\n'):
            answer = received(connected(url, text))
            assert answer.startswith(b'HTTP/1.1 400') and b'connection: close' in answer.lower()
            assert error_of(answer)['type'] == 'invalid_request_error'
        chunked = f'POST {SPEECH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n'
        assert received(connected(url, chunked + 'no length\r\n')).startswith(b'HTTP/1.1 400')
        until(lambda: not service.open)

def test_a_refusal_comes_before_the_body(service):
    "And the connection can be used again."
    service.key = 'a'
    with served(service) as url:
        sock = connected(url, f'POST {SPEECH} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n')
        answer = b''
        while not answer.endswith(b'}}'): answer += sock.recv(999)
        assert error_of(answer)['code'] == 'invalid_api_key'
        sock.sendall(b'123456789GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
        assert sock.recv(99).startswith(b'HTTP/1.1 200')

def test_places_are_for_requests_that_are_there(service, toy):
    "A body that does not come takes none."
    with served(service) as url:
        head = f'POST {SPEECH} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n'
        left = [connected(url, head) for _ in range(9)]
        assert httpx.post(url + SPEECH, json=ASKED).status_code == 200
        for sock in left: sock.close()

@pytest.mark.parametrize('given, sampling, speed', [
    ({}, (0.5, 50, 0.85, 1.), None), ({'temperature': 0, 'seed': 5}, (0, 50, 0.85, 1.), None),
    ({'speed': 0.5, 'top_k': 3, 'top_p': 0.1, 'repetition_penalty': 2}, (0.5, 3, 0.1, 2), 0.5)])
def test_each_request_has_its_sampling(client, toy, given, sampling, speed):
    assert client.post(SPEECH, json=ASKED | {'input': LONG} | given).status_code == 200
    assert {s.sampling[:4] for s in toy.submitted} == {sampling} and toy.submitted[0].given[-1] == speed

@pytest.mark.parametrize('asked, decoder, hows', [
    ({'input': LONG}, True, [(False, None), (True, 2), (True, 2)]),
    ({'input': LONG, 'response_format': 'flac'}, True, [(False, 2), (True, 2), (True, 2)]),
    ({'input': LONG}, None, [(False, 2), (True, 2), (True, 2)]),
    ({'input': 'aa. ' + LONG}, True, [(False, None), (True, 2), (True, 2)]),
    ({'input': 'aa.'}, True, [(False, 2)]),
    ({'input': 'Aa bb cc dd. Ee ff gg hh. Aa.'}, True, [(False, None)]),
    ({'input': 'Aa bb cc dd. Ee ff gg hh. Aa.'}, None, [(False, 2), (True, 2)])],
    ids=['streams', 'flac', 'griffin-lim', 'joined', 'short', 'packed', 'first alone'])
def test_what_does_not_sound_yet_is_guarded(client, toy, speaker, monkeypatch, asked, decoder, hows):
    "And only the first piece counts as new."
    monkeypatch.setattr(speaker, 'decoder', decoder)
    assert client.post(SPEECH, json=ASKED | asked).status_code == 200
    assert [s.how for s in toy.submitted] == hows

def test_a_failed_engine_is_started_anew(service, toy):
    with served(service) as url:
        for spoken in range(2):
            toy.failed = RuntimeError('x')
            until(lambda: toy.failed is None)
            assert httpx.post(url + SPEECH, json=ASKED).status_code == 200
            assert service.restarts == spoken + 1

def test_many_at_once(service, toy):
    "Five have a place and are spoken; all others hear at once that there is none."
    with served(service) as url, ThreadPoolExecutor(40) as pool:
        toy.go.clear()
        answers = [pool.submit(httpx.post, url + SPEECH, json=ASKED, timeout=9) for _ in range(40)]
        until(lambda: sum(a.done() for a in answers) == 35)
        assert service.open == 5
        toy.go.set()
        assert Counter(a.result().status_code for a in answers) == {200: 5, 429: 35}

@pytest.mark.parametrize('cured', [True, False])
def test_an_engine_that_fails_again_ends_the_service(service, toy, cured):
    "A process that cannot speak any more does not go on listening."
    raised, urls, ready, toy.cured = [], [], threading.Event(), cured
    def run():
        try: serve(service, port=0, ready=lambda url: (urls.append(url), ready.set()))
        except RuntimeError as error: raised.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10) and httpx.get(urls[0] + '/health').status_code == 200
    toy.failed = RuntimeError('first')
    until(lambda: service.restarts)
    if cured:
        until(lambda: not toy.failed)
        toy.failed = RuntimeError('second')
    thread.join(10)
    assert not thread.is_alive() and 'start it anew' in str(raised[0])
    assert str(raised[0].__cause__) == ('second' if cured else 'first')
    assert toy.closed and service.restarts == 1

@pytest.mark.parametrize('host, key, warned', [
    ('127.0.0.1', None, False), ('localhost', None, False), ('0.0.0.0', None, True), ('0.0.0.0', 'k', False)])
def test_a_warning_without_a_key(toy, host, key, warned):
    lines = []
    service = SpeechService(toy, dict, key=key)
    with served(service, host=host, log=lines.append): pass
    assert [line.startswith(f'Warning: {host} can be reached') for line in lines] == [True] * warned

def test_idle_connections_make_room(service):
    "Long before their time is over; what is left is closed with the service."
    with served(service, connections=4, request_seconds=600.) as url, httpx.Client(base_url=url) as http:
        assert http.get('/health').status_code == 200
        left = [connected(url, 'GET /') for _ in range(12)]
        assert httpx.post(url + SPEECH, json=ASKED).status_code == 200
        for sock in left[:8]:   # the oldest
            with suppress(ConnectionResetError): assert sock.recv(9) == b''

def test_a_request_that_does_not_come_is_given_up(service):
    with served(service, request_seconds=0.05) as url:
        sock = connected(url, 'GET /')
        with suppress(ConnectionResetError): assert sock.recv(9) == b''

def test_a_port_in_use(service):
    with socket.create_server(('127.0.0.1', 0)) as taken, pytest.raises(UserError, match='choose another'):
        serve(service, port=taken.getsockname()[1])
    check_port('127.0.0.1', 0)
    with socket.create_server(('127.0.0.1', 0)) as taken, pytest.raises(UserError, match='choose another'):
        check_port('127.0.0.1', taken.getsockname()[1])

def test_sigterm_finishes_what_is_under_way(service, toy):
    "The server runs in this thread, where signals are received."
    toy.go.clear()
    answers, urls, ready = {}, [], threading.Event()
    def clients():
        ask = lambda: httpx.post(urls[0] + SPEECH, json=ASKED)
        first = threading.Thread(target=lambda: answers.update(first=ask()))
        try:
            ready.wait(5)
            first.start()
            until(lambda: service.open)
        finally: os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: service.ends)
        answers.update(late=ask())
        toy.go.set()
        first.join(5)
    thread = threading.Thread(target=clients)
    thread.start()
    serve(service, port=0, ready=lambda url: (urls.append(url), ready.set()))
    thread.join(5)
    assert answers['late'].status_code == 503 and answers['late'].headers['retry-after']
    assert answers['first'].status_code == 200 and len(answers['first'].content) == 6 * PART and toy.closed

def test_after_the_time_limit_it_ends_all_the_same(service, toy):
    toy.go.clear()
    with served(service) as url:
        sock = connected(url)
        until(lambda: service.open)
        service.ends = time.monotonic()
    answer = received(sock)
    assert toy.submitted[0].cancelled.is_set() and answer.startswith(b'HTTP/1.1 503')
    assert error_of(answer)['message'] == 'The service is shutting down.'


# --- the page -----------------------------------------------------------------------------------------------

def test_the_page_loads_nothing_from_elsewhere(client):
    answer = client.get('/')
    assert "default-src 'none'" in answer.headers['content-security-policy']
    assert {*re.findall(r'https?://[^\s"\')]+', answer.text)} <= {'http://www.w3.org/2000/svg'}
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', answer.text)

def test_the_page_says_what_it_needs_where_no_script_runs(client):
    words = re.search(r'<noscript>(.*?)</noscript>', client.get('/').text, re.DOTALL)[1]
    assert 'needs JavaScript' in words and 'lang="fa" dir="rtl"' in words
    assert words.count('POST /v1/audio/speech') == 2

def test_the_page_has_each_word_in_both_languages():
    page = (serving.Path(serving.__file__).with_name('page.html')).read_text(encoding='utf-8')
    english, persian = (re.search(rf'  {language}: {{\n(.*?)\n  }},', page, re.DOTALL)[1]
                        for language in ('en', 'fa'))
    keys = lambda words: re.findall(r'(?:^|[{,])\s*(\w+): (?=[\'`{sn(])', words)
    assert keys(english) == keys(persian) and {*re.findall('data-t="(\\w+)"', page)} <= {*keys(english)}


# --- real clients -------------------------------------------------------------------------------------------

def test_the_client_of_openai(service, toy, tmp_path):
    openai = pytest.importorskip('openai', reason='no openai here: pip install openai')
    with served(service) as url:
        speech = openai.OpenAI(base_url=f'{url}/v1', api_key='any', max_retries=0).audio.speech
        asked = {'model': 'tts-1', 'voice': 'anna', 'input': 'aa bb.', 'instructions': 'cheerful'}
        with speech.with_streaming_response.create(**asked, response_format='wav',
                                                   extra_body={'seed': 3, 'language': 'en'}) as answer:
            answer.stream_to_file(tmp_path / 'a.wav')
        wav, rate = soundfile.read(tmp_path / 'a.wav')
        assert rate == RATE and len(wav) == 3 * PART and toy.submitted[0].given == ('en', 'A', 3, None)
        for kind in service.formats: assert speech.create(**asked, response_format=kind).content
        assert speech.create(**asked).content[:2] in (b'\xff\xf3', b'\xff\xfb', b'\xff\xf2')   # MP3
        for wrong, error in (({'voice': 'x'}, openai.NotFoundError), ({'input': ''}, openai.BadRequestError),
                             ({'speed': 9}, openai.BadRequestError)):
            with pytest.raises(error): speech.create(**asked | wrong)
        with pytest.raises(openai.BadRequestError, match='temperature: expected a number from 0 to 2, got 3'):
            speech.create(**asked, extra_body={'temperature': 3})
        service.open = 9
        with pytest.raises(openai.RateLimitError): speech.create(**asked)
        service.open, service.key = 0, 'other'
        with pytest.raises(openai.AuthenticationError): speech.create(**asked)


@pytest.mark.slow
def test_the_page_in_a_browser(service, toy):
    playwright = pytest.importorskip('playwright.sync_api', reason='no playwright here: make test-browser')
    from test_browser import NAMES
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found: pytest.skip('no Chromium here')
    with served(service) as url, playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=found, args=['--no-sandbox'])
        page, seen = browser.new_page(locale='en-US', viewport={'width': 390, 'height': 780}), []
        page.on('request', lambda request: seen.append(request.url))
        page.on('pageerror', lambda error: seen.append(error))
        page.goto(url)
        until(lambda: page.evaluate('document.getElementById("voice").options.length') == 2, 30.)
        assert page.evaluate('document.documentElement.scrollWidth') == 390
        toy.go.clear()
        toy.parts = 10**9
        page.get_by_label('Text').fill('aa bb.')
        page.get_by_label('Voice').select_option('bert')
        page.get_by_role('button', name='Speak').click()
        page.get_by_text('Waiting for the first sound').wait_for()
        toy.go.set()
        page.get_by_text(re.compile('Playing')).wait_for()   # while the sound is being made
        page.get_by_role('button', name='Stop').click()
        page.get_by_text(re.compile('Stopped after')).wait_for()
        until(lambda: toy.submitted[0].cancelled.is_set() and not service.open)
        toy.parts = 3
        page.get_by_role('button', name='Speak').click()
        page.get_by_text('0.3 s of sound').wait_for()
        until(lambda: page.evaluate('document.getElementById("player").duration') == 0.3, 30.)
        assert page.get_by_role('link', name='Download WAV').get_attribute('href').startswith('blob:')
        page.get_by_role('button', name='فارسی').click()
        assert page.evaluate('document.documentElement.dir') == 'rtl'
        service.open = 9
        page.get_by_role('button', name='بگو').click()
        page.get_by_role('alert').get_by_text('۴ ثانیهٔ دیگر').wait_for()
        service.open, service.key = 0, 'secret'
        page.get_by_role('button', name='بگو').click()
        page.get_by_label('کلید').wait_for()
        assert {str(s) for s in seen if not str(s).startswith((url, 'blob:', 'data:'))} == set()
        browser.close()


@pytest.mark.slow
def test_32_clients_for_half_a_minute(xtts):
    "Each hears its own text in its own voice; the memory stays as it is; beyond the queue there is 429."
    import psutil
    speaker = Speaker(xtts, max_seconds=1., temperature=0.9)
    voices = {name: speaker.listen(synthetic_voice(1., pitch)) for name, pitch in (('a', 100.), ('b', 200.))}
    engine = Engine(speaker, rows=8, chunk=8)
    service = SpeechService(engine, lambda: voices, queue=16)
    texts = ['aa bb cc', 'hh', 'dd ee ff gg', 'a', 'bb hh', 'cc cc', 'gg a', 'ff']
    cases = [(text, name, seed) for text in texts for name in voices for seed in (0, 1)]
    def alone(text, name, seed):   # guarded, as the service does it with what does not stream
        given = speaker.sampling._replace(seed=seed)
        return np.concatenate([*engine.submit(text, 'en', voices[name], given, retries=RETRIES)])
    whole = {case: alone(*case) for case in cases}
    ends, counts, memory = time.monotonic() + 30, Counter(), []

    def client(i):
        with httpx.Client(base_url=url, timeout=60) as http:
            while time.monotonic() < ends:
                case = text, voice, seed = cases[(i + counts[200]) % len(cases)]
                answer = http.post(SPEECH, json={'input': text, 'voice': voice, 'seed': seed,
                                                 'response_format': 'pcm'})
                counts[answer.status_code] += 1
                if answer.status_code == 200:
                    expected = np.clip(whole[case], -1, 1)
                    np.testing.assert_allclose(samples(answer.content), expected, atol=2e-3)
                else: time.sleep(0.05)

    with served(service) as url, ThreadPoolExecutor(33) as pool:
        clients = [pool.submit(client, i) for i in range(32)]
        while time.monotonic() < ends - 1:
            time.sleep(1)
            memory.append(psutil.Process().memory_info().rss)
        for one in clients: one.result()
    assert {*counts} == {200, 429} and counts[200] > 30
    assert max(memory[-10:]) < 1.05 * max(memory[8:15]), [m >> 20 for m in memory]
