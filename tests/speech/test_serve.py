"The service: statuses and formats, the order of sound, limits on what clients can use up, an end in order."
import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
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
from starlette.testclient import WebSocketDenialResponse

from xtts_nb.config import UserError
from xtts_nb.data.audio import synthetic_voice
from xtts_nb.data.text import train_tokenizer
from xtts_nb.speech import serve as serving
from xtts_nb.speech.generate import Sampling, Speaker
from xtts_nb.speech.voices import Voice
from xtts_nb.speech.serve import Encoder, _FORMATS, serve, _SPEECH, _speech_app, SpeechService, VoiceFolder
from xtts_nb.speech.stream import EngineClosed
from xtts_nb.speech.voices import load_voice, remove_voice, _save_voice, voice_model

RATE, PART = 24000, 2400   # samples of one sound of the toy

class Toy:
    "An engine whose sounds say which text they belong to; it speaks while `go` is set."
    sample_rate, waiting, busy, parts, overdue = RATE, 0, 0, 3, 0.

    def __init__(self, speaker):
        self.speaker, self.rows, self.go = speaker, SimpleNamespace(streams=[None, None]), threading.Event()
        self.submitted, self.error, self.closed, self.failed, self.fixed = [], None, False, None, True
        self.go.set()

    def submit(self, text, language, voice, sampling, speed, continues, retries):
        if self.failed: raise EngineClosed('closed')
        self.submitted.append(Said(self, text, (language, voice, sampling.seed, speed)))
        self.submitted[-1].how = continues is not None, retries
        self.submitted[-1].sampling = sampling
        return self.submitted[-1]

    def restart(self):
        if self.fixed: self.failed = None

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
                           sampling=Sampling(temperature=0.5), speech=small.speech)
    made._ids = partial(Speaker._ids, made)
    return made

@pytest.fixture
def toy(speaker): return Toy(speaker)

@pytest.fixture
def service(toy): return SpeechService(toy, lambda: {'anna': 'A', 'bert': 'B'}, queue=3, max_characters=70)

@pytest.fixture
def client(service):
    with TestClient(_speech_app(service), raise_server_exceptions=False) as client: yield client

LONG = 'Aa bb cc dd ee ff gg.\n\nHh aa bb cc dd ee ff!\n\nGg hh aa bb cc dd'   # three pieces
ASKED = {'input': 'aa bb.', 'voice': 'anna', 'response_format': 'pcm'}

def samples(content): return np.frombuffer(content, '<i2') / 2**15

def until(true, seconds=5.):
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, 'it never came'
        time.sleep(0.002)

# --- sound as bytes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', _FORMATS)
@pytest.mark.parametrize('rate, whole', [(RATE, False), (22050, True)])
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

# --- answers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wrong, status, param', [
    ({'input': ' \n'}, 400, None), ({'input': 'a' * 71}, 413, 'input'), ({'input': None}, 400, 'input'),
    ({'voice': 'carl'}, 404, 'voice'), ({'voice': '../../etc'}, 404, 'voice'), ({'voice': 3}, 400, 'voice'),
    ({'speed': 4.1}, 400, 'speed'), ({'seed': 2**31}, 400, 'seed'),
    ({'temperature': -0.1}, 400, 'temperature'), ({'top_k': 0}, 400, 'top_k'),
    ({'repetition_penalty': 21}, 400, 'repetition_penalty'), ({'language': 'xx'}, 400, None),
    ({'response_format': 'ogg'}, 400, 'response_format'), ({'sample_rate': 5}, 400, 'sample_rate'),
    ({'response_format': 'opus', 'sample_rate': 22050}, 400, 'response_format')], ids=str)
def test_a_wrong_request(client, toy, wrong, status, param):
    answer = client.post(_SPEECH, json=ASKED | wrong)
    error = answer.json()['error']
    assert (answer.status_code, error['param']) == (status, param) and error['message'] and not toy.submitted
    assert error['type'] == 'invalid_request_error' and set(error) == {'message', 'type', 'param', 'code'}

def test_the_key(service, client):
    assert client.post(_SPEECH, json=ASKED, headers={'Authorization': 'Bearer any'}).status_code == 200
    service.key = 'sécret'
    for given in ('', 'Bearer', 'Bearer wrong', 'Bearer sécre', 'sécret2'):
        answer = client.post(_SPEECH, content=b'x' * 9, headers={'Authorization': given.encode('latin-1')})
        assert answer.status_code == 401 and answer.json()['error']['code'] == 'invalid_api_key'
    lists = '/v1/audio/voices', '/v1/audio/models', '/v1/models/tts-1'
    for service.private_lists in (True, False):
        for path in ('/metrics', '/none'): assert client.get(path).status_code == 401
        for path in lists: assert client.get(path).status_code == (401 if service.private_lists else 200)
    for path in ('/', '/health', '/live', '/openapi.json'): assert client.get(path).status_code == 200
    for good in ('Bearer sécret', 'bearer  sécret ', 'sécret'):
        assert client.post(_SPEECH, json=ASKED, headers={'Authorization': good.encode()}).status_code == 200

def test_pieces_follow_each_other(client, toy, service):
    answer = client.post(_SPEECH, json=ASKED | {'input': LONG, 'voice': 'bert', 'seed': 7, 'speed': 2,
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
    ('home assistant', {'model': 'tts-1-hd', 'voice': 'nova', 'response_format': 'opus'}, 'audio/ogg', 'A'),
    ('no voice', {'response_format': 'aac', 'speed': None, 'seed': None}, 'audio/aac', 'A'),
    ('alias', {'voice': 'me'}, 'audio/mpeg', 'B')])
def test_what_real_clients_send(client, toy, service, name, asked, kind, voice):
    service.aliases = {'me': 'bert'}
    answer = client.post(_SPEECH, json={'input': 'aa bb.'} | asked)
    assert (answer.status_code, answer.headers['content-type']) == (200, kind)
    assert toy.submitted[0].given[1] == voice
    if name != 'livekit': return
    events = [json.loads(line.removeprefix('data: ')) for line in answer.text.split('\n\n') if line]
    assert [e['type'] for e in events][-2:] == ['speech.audio.delta', 'speech.audio.done']
    mp3 = b''.join(base64.b64decode(e['audio']) for e in events[:-1])
    assert len(soundfile.read(io.BytesIO(mp3))[0]) == 3 * PART and events[-1]['usage']['output_tokens'] == 48

def test_mixed_voices_and_own_pronunciations(client, toy, service):
    voices = {name: Voice(np.full((4, 64), value), None) for name, value in (('a', 0.), ('b', 3.))}
    service.voices, service.aliases = lambda: voices, {'both': 'a+alloy+b'}
    service.say_as = lambda text: text.replace('bb', 'dd')
    for name, mean in (('a+b', 1.5), ('a + b', 1.5), ('both', 1.), ('b+both', None), ('a' + '+a' * 8, None)):
        answer = client.post(_SPEECH, json=ASKED | {'voice': name})
        assert answer.status_code == (404 if mean is None else 200)
        if mean is not None: assert np.ptp(toy.submitted[-1].given[1].prompt - mean) < 1e-9
    assert toy.submitted[-1].text == 'aa dd.'

@pytest.mark.parametrize('headers, status', [
    ({}, 200), ({'Host': '192.168.1.2:8000'}, 200), ({'Host': 'tts.example'}, 200),
    ({'Host': 'evil.example'}, 403), ({'Host': 'localhost.evil.example:8000'}, 403),
    ({'Origin': 'https://chat.example'}, 403), ({'Origin': 'null'}, 403),
    ({'Origin': 'http://testserver'}, 200), ({'Origin': 'https://mine.example'}, 200),
    ({'Origin': 'http://testserver.evil.example'}, 403), ({'Content-Type': 'text/plain'}, 415),
    ({'Content-Type': 'text/plain; a=application/json'}, 415)], ids=str)
def test_a_page_of_another_site_cannot_fill_the_places(client, service, headers, status):
    "A browser sends these without a question in advance; a service with a key is safe from them."
    service.hosts, service.origins = {'tts.example'}, ['https://mine.example']
    assert client.post(_SPEECH, json=ASKED, headers=headers).status_code == status
    service.key = 'k'
    assert client.post(_SPEECH, json=ASKED,
                       headers=headers | {'Authorization': 'Bearer k'}).status_code == 200

def test_the_voice_comes_with_the_request(client, toy, service, singer, tmp_path):
    toy.speaker.listen = singer.listen
    asked = ASKED | {'input': 'cc dd', 'seed': '7', 'sample_rate': '24000', 'speed': '2', 'model': ''}
    def sent(wav=synthetic_voice(1.), rate=22050, path=_SPEECH, form=asked, **files):
        soundfile.write(tmp_path / 'me.wav', wav, rate)
        files = files or {'voice_file': ('../../me', (tmp_path / 'me.wav').read_bytes())}
        return client.post(path, data=form, files=files, headers={'Authorization': 'Bearer any'})
    for path in (_SPEECH, f'{_SPEECH}/upload'):
        answer, said = sent(path=path), toy.submitted[-1]
        assert answer.status_code == 200 and said.text == 'cc dd' and said.given[2:] == (7, 2.)
        heard = singer.listen(tmp_path / 'me.wav')
        for x, y in zip(said.given[1], heard): np.testing.assert_array_equal(x, y)
    assert sent(voice_file=(None, '')).status_code == 200 and toy.submitted[-1].given[1] == 'A'
    count, noise = len(toy.submitted), np.random.default_rng(0).normal(size=(9000, 9))
    pickled = ('a.pth', b'\x80\x04\x95\x0c\x00cos\nsystem\n')
    for wrong in (dict(voice_file=pickled), dict(voice_file=('a', b'')), dict(voice_file=(None, 'a')),
                  dict(other=pickled), dict(wav=np.zeros(44100)), dict(wav=np.ones(99)), dict(rate=22051),
                  dict(wav=noise), dict(form=asked | {'seed': 'x'}),
                  dict(voice_file=pickled, other=pickled)):
        error = sent(**wrong).json()['error']
        assert error['type'] == 'invalid_request_error' and '/' not in error['message'].split(' ')[0]
    assert sent(voice_file=('a', bytes(serving._FORM_BYTES))).status_code == 413
    service.forms = 2   # as many as rows
    assert sent().status_code == 429 and len(toy.submitted) == count and not service.open
    form = client.post(_SPEECH, data=asked, files={'voice_file': pickled})
    assert form.status_code == 415   # a page of another site can send it

def test_a_full_queue(client, service):
    "Two rows, and three may wait."
    service.open = 4
    assert client.post(_SPEECH, json=ASKED).status_code == 200 and service.open == 4
    service.open = 5
    answer = client.post(_SPEECH, json=ASKED)
    assert answer.status_code == 429 and answer.headers['retry-after'] == '2'
    assert answer.json()['error']['type'] == 'rate_limit_error'
    service.open = 8
    assert client.post(_SPEECH, json=ASKED).headers['retry-after'] == '4'
    assert client.get('/health').status_code == client.get('/v1/models').status_code == 200

def test_no_row_within_the_time_limit(client, service, toy):
    service.wait = 0.05
    assert client.post(_SPEECH, json=ASKED).status_code == 200
    toy.go.clear()
    answer = client.post(_SPEECH, json=ASKED | {'input': LONG})
    error = answer.json()['error']
    assert answer.status_code == 503 and answer.headers['retry-after'] == '1'
    assert (error['type'], error['code']) == ('server_error', 'queue_timeout')
    assert '0.05 s' in error['message']
    assert len(toy.submitted) == 2 and toy.submitted[1].cancelled.is_set() and not service.open

def test_while_it_ends_and_while_a_call_hangs(client, service, toy):
    for toy.overdue, ready, live in ((1., 503, 200), (70., 503, 503), (0., 200, 200)):
        assert (client.get('/health').status_code, client.get('/live').status_code) == (ready, live)
    service.ends = time.monotonic() + 9
    assert client.post(_SPEECH, json=ASKED).status_code == client.get('/health').status_code == 503
    service.ends, toy.failed = None, RuntimeError('x')   # and nobody restarts it
    assert client.get('/health').json() == {'status': 'failed'}
    assert client.post(_SPEECH, json=ASKED).status_code == client.get('/health').status_code == 503

# --- voices -------------------------------------------------------------------------------------------------

def test_a_voice_is_another_when_its_file_is_even_if_the_time_is_not(tmp_path):
    voices, path, other = VoiceFolder(tmp_path, Path.read_text), tmp_path / 'a.safetensors', tmp_path / 'b'
    for text, place in (('12', path), ('123', path), ('456', other)):
        place.write_text(text)
        os.utime(place, (1, 1))
        if place is other: other.replace(path)   # as long, and as old
        assert voices() == {'a': text}

def test_voices_are_edited_while_the_service_runs(toy, singer, tmp_path):
    "By the commands of this library, and by hands."
    reports, load = [], lambda path: load_voice(path, singer.xtts, model)
    model, low = voice_model(singer.xtts), Voice(np.zeros((4, 64)), np.zeros(32))
    path = tmp_path / 'anna.safetensors'
    service = SpeechService(toy, VoiceFolder(tmp_path, load, reports.append))
    client = TestClient(_speech_app(service))
    def spoken(): return client.post(_SPEECH, json=ASKED).status_code, len(reports)
    assert spoken() == (404, 0)
    for value in (0, 1):
        _save_voice(path, Voice(np.zeros((4, 64)), np.full(32, value)), model, [])
        assert spoken() == (200, 0) and toy.submitted[-1].given[1].vector.numpy().max() == value
    (tmp_path / os.fsdecode(b'\xff.safetensors')).touch()   # a name that would break each list of names
    assert spoken() == (200, 1)
    whole = path.read_bytes()
    for n, damaged in enumerate((b'', whole[:-9], b'\xff' * len(whole)), 2):
        path.write_bytes(damaged)
        assert spoken() == (404, n) == spoken()   # said once
    _save_voice(path, low, 'another', [])
    assert spoken() == (404, 5) and 'other encoders' in reports[-1]
    remove_voice(tmp_path, 'anna')
    assert spoken() == (404, 5)

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
    sock.sendall((f'POST {_SPEECH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}'
                  if text is None else text).encode())
    return sock

def test_sound_is_sent_while_it_is_made_and_others_do_not_wait(service, toy):
    with served(service) as url, httpx.Client(base_url=url) as http:
        toy.parts = 10**9
        with http.stream('POST', _SPEECH, json=ASKED) as endless:
            parts = endless.iter_bytes()
            first = next(parts)
            assert samples(first)[0] == pytest.approx(level('aa bb.'), abs=1e-4)
            toy.parts = 1
            assert len(http.post(_SPEECH, json=ASKED | {'input': 'cc dd'}).content) == 2 * PART
            until(lambda: service.open == 1)
            assert not toy.submitted[0].cancelled.is_set()
        until(toy.submitted[0].cancelled.is_set)   # the client closed the connection
        until(lambda: not service.open)

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

HEAD = f'POST {_SPEECH} HTTP/1.1\r\nHost: x\r\n'
NOT_WHOLE = [   # -> the status
    ('xx\r\n\r\n', 400), ('GET / HTTP/1.1\r\n\r\n', 400), (f'GET /{"a" * 70000} HTTP/1.1\r\n', 400),
    (f'{HEAD}Transfer-Encoding: chunked\r\n\r\nno length\r\n', 400),
    (f'{HEAD}Content-Length: 9\r\n\r\n{{', 408), (f'{HEAD}Content-Length: {2**30}\r\n\r\n', 413)]

def test_what_is_no_whole_request_gets_an_error_of_the_same_form(service, monkeypatch):
    "And the server closes the connection."
    monkeypatch.setattr(serving, '_REQUEST_SECONDS', 0.1)
    with served(service) as url:
        for text, status in NOT_WHOLE:
            answer = received(connected(url, text))
            assert answer.startswith(f'HTTP/1.1 {status}'.encode()), answer
            assert error_of(answer)['type'] == 'invalid_request_error'
        until(lambda: not service.open)

def test_a_refusal_comes_before_the_body(service):
    "And the connection can be used again."
    service.key = 'a'
    with served(service) as url:
        sock = connected(url, f'{HEAD}Content-Length: 9\r\n\r\n')
        answer = b''
        while not answer.endswith(b'}}'): answer += sock.recv(999)
        assert error_of(answer)['code'] == 'invalid_api_key'
        sock.sendall(b'123456789GET /health HTTP/1.1\r\nHost: x\r\n\r\n')
        assert sock.recv(99).startswith(b'HTTP/1.1 200')

def test_a_failed_engine_is_started_anew(service, toy):
    with served(service) as url:
        for spoken in range(2):
            toy.failed = RuntimeError('x')
            until(lambda: toy.failed is None)
            assert httpx.post(url + _SPEECH, json=ASKED).status_code == 200
            assert service.restarts == spoken + 1

def test_an_engine_that_fails_again_ends_the_service(service, toy):
    "A process that cannot speak any more does not continue to listen."
    raised, urls, ready = [], [], threading.Event()
    def run():
        try: serve(service, port=0, ready=lambda url: (urls.append(url), ready.set()))
        except RuntimeError as error: raised.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10) and httpx.get(urls[0] + '/health').status_code == 200
    toy.failed, toy.fixed = RuntimeError('first'), False
    thread.join(10)
    assert not thread.is_alive() and str(raised[0].__cause__) == 'first' and toy.closed

def test_a_port_in_use(service):
    with socket.create_server(('127.0.0.1', 0)) as taken, pytest.raises(UserError, match='choose another'):
        serve(service, port=taken.getsockname()[1])

def test_sigterm_finishes_what_is_under_way(service, toy):
    "The server runs in this thread, where signals are received."
    toy.go.clear()
    answers, urls, ready = {}, [], threading.Event()
    def clients():
        ask = lambda: httpx.post(urls[0] + _SPEECH, json=ASKED)
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

def test_an_idle_service_ends(service, toy):
    "But not while it speaks."
    toy.go.clear()
    with served(service, idle=99.) as url, ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, url + _SPEECH, json=ASKED)
        until(lambda: service.open)
        service.used -= 100
        time.sleep(0.3)
        toy.go.set()
        assert len(answer.result().content) == 6 * PART and not toy.closed
        until(lambda: not service.open)   # the client has the last byte before the request has ended
        service.used -= 100
        until(lambda: toy.closed)

CHILD = """if True:
    import os, sys
    from xtts_nb.app.cli_speak import _while_used
    from xtts_nb.files import _listener
    listener = _listener('127.0.0.1', 0)
    print(listener.getsockname()[1], flush=True)
    _while_used(listener)
    client = listener.accept()[0]
    client.sendall(str(os.getpid()).encode())
    sys.exit(len(client.recv(9)))"""

def test_the_next_client_starts_a_process_that_has_ended():
    "And a signal ends both."
    with subprocess.Popen([sys.executable, '-c', CHILD], stdout=-1, stderr=-1) as parent:   # -1: a pipe
        port, seen = int(parent.stdout.readline()), {parent.pid}
        for last in (False, False, True):
            with socket.create_connection(('127.0.0.1', port), 20) as client:
                seen.add(int(client.recv(9)))
                if last:
                    parent.terminate()
                    assert parent.wait(9) == 128 + signal.SIGTERM and not client.recv(9)
            if not last: assert b'idle' in parent.stderr.readline()
    assert len(seen) == 4

# --- the page -----------------------------------------------------------------------------------------------

def test_the_page_loads_nothing_from_elsewhere(client):
    answer = client.get('/')
    assert "default-src 'none'" in answer.headers['content-security-policy']
    assert {*re.findall(r'https?://[^\s"\')]+', answer.text)} <= {'http://www.w3.org/2000/svg'}
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="(?!data:)', answer.text)

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
        for wrong, error in (({'voice': 'x'}, openai.NotFoundError), ({'input': ''}, openai.BadRequestError)):
            with pytest.raises(error): speech.create(**asked | wrong)

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
        toy.parts = 10**9
        page.get_by_label('Text').fill('aa bb.')
        page.get_by_label('Voice').select_option('bert')
        page.get_by_role('button', name='Speak').click()
        page.get_by_text(re.compile('Playing')).wait_for()   # while the sound is being made
        page.get_by_role('button', name='Stop').click()
        until(lambda: toy.submitted[0].cancelled.is_set() and not service.open)
        toy.parts = 3
        page.get_by_role('button', name='Speak').click()
        until(lambda: page.evaluate('document.getElementById("player").duration') == 0.3, 30.)
        page.get_by_role('button', name='فارسی').click()
        assert page.evaluate('document.documentElement.dir') == 'rtl'
        service.key = 'secret'
        page.get_by_role('button', name='بگو').click()
        page.get_by_label('کلید').wait_for()
        assert {str(s) for s in seen if not str(s).startswith((url, 'blob:', 'data:'))} == set()
        browser.close()

# --- text over a WebSocket ----------------------------------------------------------------------------------

STREAM = '/v1/text-to-speech/{}/stream-input?output_format={}'

def rest_of(socket) -> tuple[bytes, dict]:
    "The sound that comes until a stream ends, and the last message."
    sound = b''
    while (message := socket.receive_json()).get('audio'): sound += base64.b64decode(message['audio'])
    return sound, message

def test_a_text_is_spoken_while_it_is_written(client, toy, service):
    with client.websocket_connect(STREAM.format('bert', 'pcm_24000') + '&seed=7&language_code=en') as socket:
        def say(text, **more): socket.send_json({'text': text} | more)
        say(' ', voice_settings={'speed': 2})
        for word in ('Aa bb', ' cc dd ee', ' ff, ', 'gg'): say(word)
        until(lambda: toy.submitted)   # a clause, which is heard while the rest is written
        first = base64.b64decode(socket.receive_json()['audio'])
        assert samples(first)[0] == pytest.approx(level('Aa bb cc dd ee ff,'), abs=1e-4)
        say(' hh! Aa, '), say('bb', flush=True), say('')
        sound, message = rest_of(socket)
        assert message == {'audio': None, 'isFinal': True}
    assert ''.join(s.text for s in toy.submitted).replace(' ', '') == 'Aabbccddeeff,gghh!Aa,bb'
    assert {(*s.given[:2], s.given[3]) for s in toy.submitted} == {('en', 'B', 2.)}
    until(lambda: not service.open)
    assert toy.submitted[0].given[2] == 7 and len(sound) > 6 * PART
    assert service.metrics.statuses() == {101: 1}

@pytest.mark.parametrize('voice, form, messages, code', [
    ('carl', 'pcm_24000', [], 404), ('anna', 'ulaw_8000', [], 400), ('anna', 'flac_24000', [], 400),
    ('anna', 'pcm_24000', ['no JSON'], 400), ('anna', 'pcm_24000', ['[' * 9999], 400),
    ('anna', 'pcm_24000', ['{"text": 3}'], 400),
    ('anna', 'pcm_24000', ['{"text": "a", "voice_settings": {"speed": 9}}'], 400),
    ('anna', 'pcm_24000', [json.dumps({'text': 'a' * 2**20})], 413), ('anna', 'mp3_24000', [], 408)], ids=str)
def test_a_stream_that_is_refused(client, toy, service, monkeypatch, voice, form, messages, code):
    monkeypatch.setattr(serving, '_QUIET_SECONDS', (.1, .1))
    with client.websocket_connect(STREAM.format(voice, form)) as socket:
        for message in messages: socket.send_text(message)
        error = socket.receive_json()
        assert error['code'] == code and error['message'] and not toy.submitted
        assert socket.receive()['code'] == 1008
    until(lambda: not service.open)

def test_a_text_of_any_parts_is_spoken_whole(client, toy, service):
    "Also words over the limit of a request, halves of one character, and text after its end."
    said = 'Aa bb ' * 30 + '\U0001f600 cc.'
    with client.websocket_connect(STREAM.format('anna', 'pcm_24000')) as socket:
        parts = [said[i:i + 50] for i in range(0, len(said), 50)]
        half = json.dumps(parts[-1]).index('\\ude00')
        for part in parts[:-1]: socket.send_json({'text': part})
        for part in (json.dumps(parts[-1])[:half] + '"', '"' + json.dumps(parts[-1])[half:]):
            socket.send_text(f'{{"text": {part}}}')
        for _ in range(3): socket.send_json({'text': ''})
        assert rest_of(socket)[1]['isFinal']
    spoken = ' '.join(s.text for s in toy.submitted).split()
    assert spoken.count('Aa') == spoken.count('bb') == 30 and '\U0001f600' in ''.join(spoken)

def test_who_may_open_a_stream(client, service):
    for headers, key in (({'Origin': 'https://evil.example'}, None), ({'xi-api-key': 'wrong'}, 'secret')):
        service.key = key
        with pytest.raises(WebSocketDenialResponse) as refused:
            client.websocket_connect(STREAM.format('anna', 'pcm_24000'), headers=headers).__enter__()
        assert refused.value.status_code == (401 if key else 403)
    path = STREAM.format('anna', 'pcm_24000')
    with client.websocket_connect(path, headers={'xi-api-key': 'secret'}) as socket:
        socket.send_json({'text': ''})
        assert rest_of(socket)[1]['isFinal']

def test_requests_as_elevenlabs_has_them(client, toy, service):
    "A sound without speech has no word times, and leaves no request open."
    path = '/v1/text-to-speech/bert{}?output_format=pcm_24000'
    asked = {'text': 'aa bb. ', 'seed': 7, 'voice_settings': {'speed': 2}, 'model_id': 'x'}
    for ending in ('', '/stream'):
        answer = client.post(path.format(ending), json=asked)
        assert answer.headers['content-type'] == 'audio/pcm' and len(samples(answer.content)) == 3 * PART
    assert {s.given for s in toy.submitted} == {('en', 'B', 7, 2.)}
    assert client.get('/v1/voices').json()['voices'][0] == {'voice_id': 'anna', 'name': 'anna'}
    for body in ({}, [], {'text': 'a', 'seed': 'x'}, {'text': 'a', 'voice_settings': 3}):
        assert client.post(path.format(''), json=body).status_code == 400
    assert client.post(path.format('').replace('bert', 'carl'), json=asked).status_code == 404
    assert client.post(path.format('/with-timestamps'), json=asked).status_code == 400
    bearer = {'Authorization': 'Bearer any'}
    assert client.post(path.format(''), files={'voice_file': b'x'}, headers=bearer).status_code == 415
    until(lambda: not service.open)

def test_the_client_of_elevenlabs(service, toy):
    elevenlabs = pytest.importorskip('elevenlabs.client', reason='no elevenlabs here: pip install elevenlabs')
    with served(service, request_seconds=.5) as url:
        speech = elevenlabs.ElevenLabs(api_key='any', base_url=url).text_to_speech
        speech._ws_base_url = url.replace('http', 'ws')   # it knows wss alone
        def words():
            for word in ('Aa bb cc dd ee ff, ', 'gg hh. ', 'Hh aa.'):
                yield word
                time.sleep(.3)   # longer than a connection may be without a request
        assert b''.join(speech.convert('anna', text='aa bb.', output_format='pcm_24000'))
        toy.submitted.clear()
        sound = b''.join(speech.convert_realtime('anna', text=words(), output_format='pcm_24000'))
        assert len(sound) > 3 * 6 * PART and len(toy.submitted) == 3
        until(lambda: not service.open)
