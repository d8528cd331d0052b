"The benchmark of the service: many clients at once, and what their answers say."
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from xtts_nb.app import speed as page
from xtts_nb.app.speed import load_row, load_speaker, service_load
from xtts_nb.config import UserError
from xtts_nb.data.text import train_tokenizer
from xtts_nb.speech.generate import Sampling


def test_a_row():
    "Ten and two admitted in two waves; the median of the first wave is 0.55 s, that of the second 1.5 s."
    waves = [[(200, i / 10, 9.) for i in range(1, 11)] + [(429, 0.01, 0.02), (503, 5., 5.)],
             [(200, 1., 9.), (200, 2., 9.), (429, 0.03, 0.04)]]
    assert load_row(12, waves) == {
        'name': '12 clients', 'first_p50_ms': 650., 'first_p99_ms': 1890., 'spread': 1.39, 'waves': 2,
        'admitted': 12, 'refused': 2, 'late': 1, 'refused_p99_ms': 29.8}
    alone = load_row(1, [[(200, 0.5, 1.)]])
    assert (alone['name'], alone['refused_p99_ms'], alone['spread']) == ('1 client', None, 0.)
    for answers in ([(200, 1., 1.), (400, 1., 1.)], [(429, 1., 1.)]):
        with pytest.raises(UserError, match='give a text that the model can speak'): load_row(2, [answers])

class Slow:
    "An engine that speaks to a single client at once, and to many when all places are taken."
    sample_rate, waiting, busy, failed, closed = 24000, 0, 0, None, False

    def __init__(self, speaker, rows):
        self.speaker, self.rows, self.warm = speaker, SimpleNamespace(streams=[None] * rows), []
        self.asked, self.go = [], threading.Event()

    def warm_up(self, voice): self.warm.append(voice)
    def close(self): self.closed = True

    def submit(self, text, language, voice, *_, **__):
        self.asked.append((text, voice))
        if len(self.asked) in (1, 9): self.go.set()    # the first, and the last of six
        elif len(self.asked) == 4: self.go.clear()     # the first of six
        return Sound(self.go)

class Sound:
    codes, started = 1, True
    def __init__(self, go): self.go = go
    def cancel(self): pass
    def __iter__(self):
        self.go.wait(20)
        yield np.zeros(240)

def test_the_service_is_asked_by_all_at_once(monkeypatch):
    "Two rows and four places: of twelve clients six are spoken, six are refused."
    made = []
    monkeypatch.setattr(page, 'Engine', lambda *given: made.append(Slow(*given)) or made[0])
    monkeypatch.setattr(page, 'ONE_CLIENT_WAVES', 2)
    tokenizer = train_tokenizer([page.LOAD_TEXT], ['en'])
    speaker = SimpleNamespace(listen=len, decoder=None, sampling=Sampling(), speech=SimpleNamespace(speed=1.))
    monkeypatch.setattr('xtts_nb.speech.long.text_pieces', lambda speaker, text, language, soon: (
        [SimpleNamespace(text=text, language=language, pause=0.)], [3]))
    speaker.xtts, told = SimpleNamespace(tokenizer=tokenizer), []
    rows = service_load(speaker, 'Hello', (1, 12), 1, 2, 4, lambda *done: told.append(done))
    assert [(r['name'], r['waves'], r['admitted'], r['refused'], r['late']) for r in rows] == [
        ('1 client', 2, 2, 0, 0), ('12 clients', 1, 6, 6, 0)]
    assert rows[1]['refused_p99_ms'] < rows[1]['first_p50_ms'] and told == [(1, 3), (2, 3), (3, 3)]
    assert made[0].asked == [('Hello', 44100)] * 9 and made[0].warm == [44100] and made[0].closed

@pytest.mark.slow
def test_200_clients_at_once():
    "A real engine: 72 have a place and are spoken, the others know at once that there is none."
    (row,) = service_load(load_speaker()[0], clients=(200,), rounds=1)
    assert row['admitted'] >= 72 and row['admitted'] + row['refused'] == 200 and not row['late']
    assert row['refused_p99_ms'] < row['first_p50_ms']
