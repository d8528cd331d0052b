"The watched time, divided into parts that sum to 100 %."
import pytest

from watched import LINE, seen
from xtts_nb.monitor.seen import account
from xtts_nb.monitor.watch import Event

def test_each_moment_belongs_to_one_part():
    "Of 10 s: 4 s are waited, 3 s computed, 1 s of it traced; what is left is divided by looks."
    some = ('next', 0., 4.), ('call', 4., 2.), ('fetch', 4.5, 1.), ('variable', 6., 9.), ('end', 9.5, 2.)
    events = [Event(kind, LINE, *when) for kind, *when in some] + [Event('call', LINE, 7., 1., traced=True)]
    parts = account(seen(['own'] * 30 + ['save'] * 10 + ['graph'] * 60, events))
    assert parts == pytest.approx({'input': .4, 'graph': .2, 'trace': .1, 'end': .05,
                                   'own': .1875, 'save': .0625})
    assert sum(parts.values()) == pytest.approx(1) and account(seen([], [])) == {'own': 1.}
