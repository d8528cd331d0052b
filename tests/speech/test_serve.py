"The service: statuses and formats, the order of sound, limits on what clients can use up, an end in order."
import asyncio
import io
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
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
from xtts_nb.speech.generate import Speaker
from xtts_nb.speech.serve import (
    check_port, FORMATS, Metrics, serve, sound_formats, SoundWriter, SPEECH, speech_app, SpeechService,
    VoiceFolder)
from xtts_nb.speech.stream import Engine, EngineClosed

RATE, PART = 24000, 2400   # samples of one sound of the toy


class Toy:
    "An engine whose sounds say which text they belong to; it speaks while `go` is set."
    sample_rate, waiting, busy, parts = RATE, 0, 0, 3

    def __init__(self, speaker):
        self.speaker, self.rows, self.go = speaker, SimpleNamespace(streams=[None, None]), threading.Event()
        self.submitted, self.error, self._closed = [], None, False
        self.go.set()

    def submit(self, text, language, voice, seed=0, speed=1.):
        if self._closed: raise EngineClosed('closed')
        self.submitted.append(Said(self, text, (language, voice, seed, speed)))
        return self.submitted[-1]

    def close(self): self._closed = True


class Said:
    def __init__(self, engine, text, given):
        self.engine, self.text, self.given = engine, text.strip(), given
        self.codes, self.read, self.cancelled = 0, 0, threading.Event()

    def __iter__(self):
        for i in range(self.engine.parts):
            while not self.engine.go.wait(0.002):
                if self.cancelled.is_set(): return
            if self.engine.error and i >= self.engine.error[0]: raise self.engine.error[1]
            self.codes += 16
            yield np.full(PART, level(self.text), np.float32)

    def cancel(self): self.cancelled.set()


def level(text): return sum(map(ord, text)) % 97 / 100


@pytest.fixture(scope='module')
def speaker(small):
    "The part of a speaker that knows what can be said."
    tokenizer = train_tokenizer(['Aa bb, cc dd! Ee ff gg hh.'] * 9, ['en'])
    made = SimpleNamespace(xtts=SimpleNamespace(tokenizer=tokenizer, config=small), rates={})
    made._ids = partial(Speaker._ids, made)
    return made

@pytest.fixture
def toy(speaker): return Toy(speaker)

@pytest.fixture
def service(toy): return SpeechService(toy, lambda: {'anna': 'A', 'bert': 'B'}, queue=3, max_characters=70)

@pytest.fixture
def client(service):
    with TestClient(speech_app(service), raise_server_exceptions=False) as client: yield client

LONG = 'Aa bb cc dd ee ff gg. Hh aa bb cc dd ee ff! Gg hh aa bb cc dd ee'   # three pieces
ASKED = {'input': 'aa bb.', 'voice': 'anna', 'response_format': 'pcm'}

def samples(content): return np.frombuffer(content, '<i2') / 2**15

def until(true, seconds=5.):
    "Wait for a condition."
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, 'it never came'
        time.sleep(0.002)


# --- sound as bytes -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', sound_formats(RATE))
def test_a_format_gives_the_sound_back(kind):
    wav, writer = 0.4 * synthetic_voice(1., 150.), SoundWriter(kind, RATE)
    parts = [writer.write(part) for part in np.array_split(wav, 3)] + [writer.end()]
    early, whole = sum(map(len, parts[:-1])), b''.join(parts)
    if kind == 'pcm': back = samples(whole)
    else: back, rate = soundfile.read(io.BytesIO(whole)); assert rate == RATE
    assert abs(len(back) - len(wav)) < 3000 and (kind != 'flac') == (early > 0)
    if kind in ('wav', 'pcm', 'flac'): np.testing.assert_allclose(back, wav, atol=1e-4)
    else: assert max(np.correlate(back, wav[4000:12000])) > 0.9 * (wav[4000:12000]**2).sum()

def test_samples_are_clipped_and_formats_fit_the_rate():
    writer = SoundWriter('wav', 22050)
    assert writer.write(np.float32([2, -2, 0.5]))[44:] == np.int16([32767, -32768, 16384]).tobytes()
    assert [*FORMATS] == sound_formats(RATE) and {*FORMATS} - {*sound_formats(22050)} == {'opus'}


def test_a_large_end_is_sent_in_parts(service, monkeypatch):
    "A connection is closed when one part waits too long."
    monkeypatch.setattr(SoundWriter, 'end', lambda writer: bytes(150_000))
    async def parts():
        wanted = serving.SpeechBody(**ASKED)
        return [len(part) async for part in service.sound(wanted, *await service.check(wanted), 0.)]
    assert asyncio.run(parts())[-3:] == [65536, 65536, 18928]

def test_the_language_of_a_service(toy):
    assert SpeechService(toy, dict, language='auto').language == 'auto'
    with pytest.raises(UserError, match='no language "ne"; it has en'):
        SpeechService(toy, dict, language='ne')


# --- answers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('wrong, status, param, words', [
    ({'input': ''}, 400, None, 'text is empty'), ({'input': ' \n'}, 400, None, 'text is empty'),
    ({'input': '?! ..'}, 400, None, ''), ({'input': 'aa Ω'}, 400, None, 'never saw the characters'),
    ({'input': 'a' * 71}, 413, 'input', 'limit is 70'), ({'input': None}, 400, 'input', 'input: '),
    ({'voice': 'carl'}, 404, 'voice', 'no voice "carl"; there is anna, bert'),
    ({'voice': '../../etc'}, 404, 'voice', 'no voice'), ({'voice': ''}, 404, 'voice', 'no voice'),
    ({'speed': 4.1}, 400, 'speed', 'speed: '), ({'speed': 0.2}, 400, 'speed', 'speed: '),
    ({'seed': -1}, 400, 'seed', 'seed: '), ({'seed': 2**31}, 400, 'seed', 'seed: '),
    ({'language': 'xx'}, 400, None, 'no language "xx"'),
    ({'language': 'e' * 21}, 400, 'language', 'language: '),
    ({'response_format': 'aac'}, 400, 'response_format', ''),
    ({'stream_format': 'sse'}, 400, 'stream_format', '')],
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

def test_a_format_that_cannot_be_written(client, service):
    service.formats = ['wav', 'pcm']
    answer = client.post(SPEECH, json=ASKED | {'response_format': 'mp3'})
    assert answer.status_code == 400 and 'there is wav, pcm' in answer.json()['error']['message']

def test_other_paths(client):
    for answer, status in ((client.get('/v1/nothing'), 404), (client.get(SPEECH), 405)):
        assert answer.status_code == status and answer.json()['error']['type'] == 'invalid_request_error'
    assert client.get(SPEECH).headers['allow'] == 'POST'
    assert [v['id'] for v in client.get('/v1/audio/voices').json()['voices']] == ['anna', 'bert']
    assert client.get('/v1/audio/voices').json()['languages'] == ['en']
    assert client.get('/v1/models').json()['data'][0]['object'] == 'model'
    assert client.get('/health').json() == {'status': 'ok'}
    schema = client.get('/openapi.json').json()['paths'][SPEECH]['post']
    assert 'input' in schema['requestBody']['content']['application/json']['schema']['required']

def test_the_key(service, client):
    assert client.post(SPEECH, json=ASKED, headers={'Authorization': 'Bearer any'}).status_code == 200
    service.key = 'sécret'
    for given in ('', 'Bearer', 'Bearer wrong', 'Bearer sécre', 'sécret2'):
        answer = client.post(SPEECH, content=b'x' * 9, headers={'Authorization': given.encode('latin-1')})
        assert answer.status_code == 401 and answer.json()['error']['code'] == 'invalid_api_key'
    for path in ('/v1/audio/voices', '/v1/models', '/metrics'): assert client.get(path).status_code == 401
    for path in ('/', '/health'): assert client.get(path).status_code == 200
    good = {'Authorization': 'Bearer sécret'.encode()}
    assert client.post(SPEECH, json=ASKED, headers=good).status_code == 200

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
    assert ' '.join(s.text for s in said) == LONG and len(said) == 3
    assert {s.given for s in said} == {('en', 'B', 7, 2.)}
    pause = np.zeros(round(0.35 / 2 * RATE))
    spoken = [np.full(3 * PART, level(s.text)) for s in said]
    expected = np.concatenate([spoken[0], pause, spoken[1], pause, spoken[2]])
    np.testing.assert_allclose(samples(answer.content), expected, atol=1e-4)
    assert service.metrics.codes == 3 * 48 and service.metrics.seconds == 9 * PART / RATE and not service.open

def test_a_full_queue(client, toy):
    toy.waiting, toy.busy = 3, 1
    assert client.post(SPEECH, json=ASKED).status_code == 200
    toy.busy = 2
    answer = client.post(SPEECH, json=ASKED)
    assert answer.status_code == 429 and answer.headers['retry-after'] == '2'
    assert answer.json()['error']['type'] == 'rate_limit_error'

@pytest.mark.parametrize('error, status', [(EngineClosed('x'), 503), (RuntimeError('x'), 500)], ids=str)
def test_an_engine_that_fails_has_a_status(client, toy, error, status, service):
    toy.error = 0, error
    answer = client.post(SPEECH, json=ASKED | {'response_format': 'wav'})
    assert answer.status_code == status and answer.json()['error']['type'] == 'server_error'
    assert not service.open and service.metrics.requests == {status: 1}

def test_while_it_ends(client, service, toy):
    service.ends = time.monotonic() + 9
    assert client.post(SPEECH, json=ASKED).status_code == client.get('/health').status_code == 503
    service.ends, toy._closed = None, True   # the thread of the engine has failed
    assert client.get('/health').json() == {'status': 'failed'}
    assert client.post(SPEECH, json=ASKED).status_code == client.get('/health').status_code == 503

def test_metrics(client, service):
    for wrong in ({}, {}, {'voice': 'x'}): client.post(SPEECH, json=ASKED | wrong)
    lines = client.get('/metrics').text.splitlines()
    assert not {'xtts_requests_total{status="200"} 2', 'xtts_requests_total{status="404"} 1',
                'xtts_codes_total 96', 'xtts_sound_seconds_total 0.6', 'xtts_first_sound_seconds_count 2',
                'xtts_queue_length 0', 'xtts_rows_busy 0',
                '# TYPE xtts_first_sound_seconds histogram'} - {*lines}
    metrics = Metrics()
    for seconds in (0.05, 0.1, 3, 99): metrics.first_sound(seconds)
    counts = re.findall(r'le="(.+)"} (\d)', metrics.text(0, 0))
    assert ' '.join(f'{edge}:{n}' for edge, n in counts) == (
        '0.1:2 0.2:2 0.5:2 1:2 2:2 5:3 10:3 30:3 60:3 +Inf:4')
    assert 'first_sound_seconds_sum 102.15' in metrics.text(0, 0)


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
    with pytest.raises(UserError, match='is no folder of voices'): VoiceFolder(tmp_path / 'none', load)


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
        assert not thread.is_alive() and service.engine._closed and not service.open

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
            assert not toy.submitted[0].cancelled.is_set() and service.open == 1
        until(toy.submitted[0].cancelled.is_set)   # the client closed the connection
        until(lambda: not service.open)

def test_a_client_that_goes_away_before_the_first_sound(service, toy):
    with served(service) as url:
        toy.go.clear()
        sock = connected(url, input=LONG)
        until(lambda: len(toy.submitted) == 2)   # not all three
        sock.close()
        until(lambda: all(s.cancelled.is_set() for s in toy.submitted) and not service.open)
        until(lambda: service.metrics.requests == {499: 1})

def test_a_client_that_does_not_read_is_given_up(service, toy):
    with served(service, stall_seconds=0.1) as url:
        toy.parts = 10**9
        sock = connected(url)
        until(lambda: toy.submitted and toy.submitted[0].cancelled.is_set() and not service.open, 20)
        with suppress(ConnectionResetError):
            while sock.recv(2**20): pass

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

def test_idle_connections_make_room(service):
    with served(service, connections=4, request_seconds=0.3) as url, httpx.Client(base_url=url) as http:
        assert http.get('/health').status_code == 200
        left = [connected(url, 'GET /') for _ in range(12)]
        begun = time.monotonic()
        assert httpx.post(url + SPEECH, json=ASKED).status_code == 200 and time.monotonic() - begun < 0.3
        for sock in left:
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
    assert answers['first'].status_code == 200 and len(answers['first'].content) == 6 * PART and toy._closed

def test_after_the_time_limit_it_ends_all_the_same(service, toy):
    toy.go.clear()
    with served(service) as url:
        sock = connected(url)
        until(lambda: service.open)
        service.ends = time.monotonic()
    assert toy.submitted[0].cancelled.is_set() and sock.recv(12) == b'HTTP/1.1 500'


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
        assert rate == RATE and len(wav) == 3 * PART and toy.submitted[0].given == ('en', 'A', 3, 1.)
        for kind in service.formats: assert speech.create(**asked, response_format=kind).content
        assert speech.create(**asked).content[:2] in (b'\xff\xf3', b'\xff\xfb', b'\xff\xf2')   # MP3
        for wrong, error in (({'voice': 'x'}, openai.NotFoundError), ({'input': ''}, openai.BadRequestError),
                             ({'speed': 9}, openai.BadRequestError)):
            with pytest.raises(error): speech.create(**asked | wrong)
        toy.waiting = 9
        with pytest.raises(openai.RateLimitError): speech.create(**asked)
        service.key = 'other'
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
        page.wait_for_function('document.getElementById("voice").options.length == 2')
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
        page.wait_for_function('document.getElementById("player").duration == 0.3')
        assert page.get_by_role('link', name='Download WAV').get_attribute('href').startswith('blob:')
        page.get_by_role('button', name='فارسی').click()
        assert page.evaluate('document.documentElement.dir') == 'rtl'
        toy.waiting = 9
        page.get_by_role('button', name='بگو').click()
        page.get_by_role('alert').get_by_text('۵ ثانیهٔ دیگر').wait_for()
        service.key = 'secret'
        page.get_by_role('button', name='بگو').click()
        page.get_by_label('کلید').wait_for()
        assert {str(s) for s in seen if not str(s).startswith((url, 'blob:', 'data:'))} == set()
        browser.close()


@pytest.mark.slow
def test_32_clients_for_a_minute(xtts):
    "Each hears its own text in its own voice; the memory stays as it is; beyond the queue there is 429."
    import psutil
    speaker = Speaker(xtts, max_seconds=1., temperature=0.9)
    voices = {name: speaker.listen(synthetic_voice(1., pitch)) for name, pitch in (('a', 100.), ('b', 200.))}
    engine = Engine(speaker, rows=8, chunk=8)
    service = SpeechService(engine, lambda: voices, queue=16)
    texts = ['aa bb cc', 'hh', 'dd ee ff gg', 'a', 'bb hh', 'cc cc', 'gg a', 'ff']
    cases = [(text, name, seed) for text in texts for name in voices for seed in (0, 1)]
    whole = {case: speaker(case[0], 'en', voices[case[1]], seed=case[2]) for case in cases}
    ends, counts, memory = time.monotonic() + 60, Counter(), []

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
    assert {*counts} == {200, 429} and counts[200] > 60
    assert max(memory[-20:]) < 1.05 * max(memory[15:30]), [m >> 20 for m in memory]
