"Watched programs, made by hand."
from types import SimpleNamespace

import tensorflow as tf

from xtts_nb.monitor.seen import _Seen
from xtts_nb.monitor.watch import Event, _Look, _Passes, _Place

LINE, OTHER = _Place(__file__, 3), _Place(__file__, 4)

def passes(datasets) -> _Passes:
    "Passes over some datasets, one after the other."
    out = _Passes()
    for dataset in datasets: out.add(dataset)
    return out

def watched(looks=(), events=(), python=(), **more):
    "A watch of 10 s: the kind of each look, 100 a second, at one line."
    looks = [_Look(i / 100, *(k if isinstance(k, tuple) else (LINE, k)), 'inside')
             for i, k in enumerate(looks)]
    given = dict(begun=0., ended=10., fits=[], windows=[], datasets={}, functions={}, last={}, shapes={},
                 validated=passes([]), beside=[], same={}, early={}, owners={}, concrete_functions=list,
                 cards=None, missing=[])
    more['datasets'] = {place: passes(some) for place, some in more.get('datasets', {}).items()}
    return SimpleNamespace(looks=looks, events=[*events], python=[*python], pipeline_place=lambda *_: None,
                           **given | more)

def seen(looks=(), events=(), loop=('next', LINE), **more) -> _Seen:
    watch = watched(looks, events, **more)
    return _Seen(watch, 0., 10., loop, [e for e in events if e.kind == loop[0]])

def calls(kind, count, every=.1, seconds=.01, place=LINE, **more):
    return [Event(kind, place, every * i, seconds, **more) for i in range(count)]

def threads(n, data):
    options = tf.data.Options()
    options.threading.private_threadpool_size = n
    return data.with_options(options)

def only(found):
    (one,) = found
    return one
