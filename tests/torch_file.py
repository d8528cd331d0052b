"A file as PyTorch writes it, byte by byte: an archive of a pickle and of the numbers of each tensor."
import struct
import zipfile
from pathlib import Path

import numpy as np

def name(module: str, what: str) -> bytes: return f'c{module}\n{what}\n'.encode()
def text(value: str) -> bytes: return b'X' + struct.pack('<I', len(value.encode())) + value.encode()
def number(value: int) -> bytes: return b'J' + struct.pack('<i', value)
def several(*parts: bytes) -> bytes: return b'(' + b''.join(parts) + b't'
def call(function: bytes, *given: bytes) -> bytes: return function + several(*given) + b'R'

def tensor(key: int, count: int, size: tuple, stride: tuple, offset: int = 0) -> bytes:
    "A tensor over the numbers of one key."
    kind = text('storage'), name('torch', 'FloatStorage')
    about = several(*kind, text(str(key)), text('cpu'), number(count)) + b'Q'
    lengths = (several(*map(number, each)) for each in (size, stride))
    return call(name('torch._utils', '_rebuild_tensor_v2'), about, number(offset), *lengths, b'\x89',
                call(name('collections', 'OrderedDict')))

def write(path: Path, pickled: bytes, numbers: list[np.ndarray] = (), root: str = 'archive'):
    "A pickle without header and end, and the numbers under their keys."
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr(f'{root}/data.pkl', b'\x80\x02' + pickled + b'.')
        for key, x in enumerate(numbers): archive.writestr(f'{root}/data/{key}', x.tobytes())

def write_dict(path: Path, contents: dict, **more: bytes):
    "Dictionaries of float32 arrays; `more`: pickled values of other keys."
    numbers = []

    def pickled(x):
        if isinstance(x, dict): return b'}(' + b''.join(text(k) + pickled(v) for k, v in x.items()) + b'u'
        numbers.append(x)
        return tensor(len(numbers) - 1, x.size, x.shape, tuple(s // x.itemsize for s in x.strides))
    write(path, pickled(contents)[:-1] + b''.join(text(k) + v for k, v in more.items()) + b'u', numbers)
