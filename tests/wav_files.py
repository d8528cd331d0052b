"Wav files, byte by byte: some that are read natively, and some that would be noise."
import io
import struct

import numpy as np
import soundfile


SAMPLES = np.random.default_rng(0).integers(-20000, 20000, 999, np.int16)

def chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    "A chunk of a RIFF file with its padding; `size` is what it claims, if that is wrong."
    return name + struct.pack('<I', len(body) if size is None else size) + body + b'\0' * (len(body) % 2)

def fmt(form=1, channels=1, rate=22050, bits=16, more=b'') -> bytes:
    block = channels * bits // 8
    return chunk(b'fmt ', struct.pack('<HHIIHH', form, channels, rate, rate * block, block, bits) + more)

def riff(*chunks, mark=b'RIFF', kind=b'WAVE', size=None) -> bytes:
    return chunk(mark, kind + b''.join(chunks), size)

def extensible(form: int, bits: int) -> bytes:
    "Behind a `fmt ` of format 0xFFFE: valid bits, speaker positions, and the GUID that holds the format."
    return struct.pack('<HHIH', 22, bits, 4, form) + bytes.fromhex('000000001000800000aa00389b71')

def encoded(**how) -> bytes:
    "The samples as libsndfile writes them."
    file = io.BytesIO()
    soundfile.write(file, SAMPLES / 32768, **dict(samplerate=22050, format='WAV', subtype='PCM_16') | how)
    return file.getvalue()

BYTES = SAMPLES.tobytes()

DATA = chunk(b'data', BYTES)

LIST = chunk(b'LIST', b'noise!')

GOOD = {
    'plain': riff(fmt(), DATA),
    'long fmt': riff(fmt(more=b'\0\0'), DATA),
    'extensible': riff(fmt(0xFFFE, more=extensible(1, 16)), DATA),
    'WAVEX of libsndfile': encoded(format='WAVEX'),
    'chunk before': riff(fmt(), LIST, DATA),
    'odd chunk before': riff(fmt(), chunk(b'LIST', b'noise!!'), DATA),
    'odd chunk first': riff(chunk(b'JUNK', b'1234567'), fmt(), DATA),
    'data inside a chunk': riff(fmt(), chunk(b'JUNK', b'data\4\0\0\0noise!'), DATA),
    'chunk behind': riff(fmt(), DATA, LIST),
    'one sample': riff(fmt(), chunk(b'data', BYTES[:2])),
    'one sample behind a chunk': riff(fmt(), LIST, chunk(b'data', BYTES[:2])),
    'truncated': riff(fmt(), DATA)[:-500],
    'truncated in a sample': riff(fmt(), DATA)[:-501],
    'odd data': riff(fmt(), chunk(b'data', BYTES[:-1])),
    'endless': riff(fmt(), chunk(b'data', BYTES, 2**32 - 1), size=2**32 - 1),
    'data too long': riff(fmt(), chunk(b'data', BYTES, 9999)),
    'data too short': riff(fmt(), chunk(b'data', BYTES, 500)),
    'file too short': riff(fmt(), DATA, size=4)}

BAD = {   # name -> file, what its error says
    '8 bit': (encoded(subtype='PCM_U8'), 'wav of format 1, 1 channels, 22050 Hz, 8 bits'),
    '24 bit': (encoded(subtype='PCM_24'), 'wav of format 1, 1 channels, 22050 Hz, 24 bits'),
    '32 bit': (encoded(subtype='PCM_32'), 'wav of format 1, 1 channels, 22050 Hz, 32 bits'),
    'float': (encoded(subtype='FLOAT'), 'wav of format 3, .* 32 bits'),
    'double': (encoded(subtype='DOUBLE'), 'wav of format 3, .* 64 bits'),
    'extensible float': (riff(fmt(0xFFFE, bits=32, more=extensible(3, 32)), chunk(b'data', 2 * BYTES)),
                         'wav of format 3, 1 channels, 22050 Hz, 32 bits'),
    'mu-law': (encoded(subtype='ULAW'), 'wav of format 7'),
    'ADPCM': (encoded(subtype='MS_ADPCM'), 'wav of format 2'),
    'stereo': (riff(fmt(channels=2), chunk(b'data', 2 * BYTES)),
               'wav of format 1, 2 channels, 22050 Hz, 16 bits'),
    '44.1 kHz': (riff(fmt(rate=44100), DATA), 'wav of format 1, 1 channels, 44100 Hz, 16 bits'),
    'FLAC': (encoded(format='FLAC'), 'no wav file'),
    'AIFF': (encoded(format='AIFF'), 'no wav file'),
    'RF64': (encoded(format='RF64'), 'no wav file'),
    'RIFX': (riff(fmt(), DATA, mark=b'RIFX'), 'no wav file'),
    'AVI': (riff(fmt(), DATA, kind=b'AVI '), 'no wav file'),
    'text': (b'These are 45 bytes of text, and no wav file.\n', 'no wav file'),
    '4 bytes': (b'RIFF', 'broken head'),
    'empty': (b'', 'no wav file'),
    'no fmt': (riff(DATA), 'broken head'),
    'fmt behind': (riff(DATA, fmt()), 'broken head'),
    'no data': (riff(fmt()), 'with 0 bytes of samples'),
    'data never sized': (riff(fmt(), chunk(b'data', BYTES, 0)), 'with 0 bytes of samples'),
    'one byte': (riff(fmt(), chunk(b'data', b'a')), 'with 1 bytes of samples'),
    'one byte behind a chunk': (riff(fmt(), LIST, chunk(b'data', b'a')), 'with 1 bytes of samples'),
    'head only': (riff(fmt(), chunk(b'data', b'')), 'with 0 bytes of samples'),
    'endless chunk': (riff(fmt(), chunk(b'LIST', b'noise!', 2**32 - 16), DATA), 'with 0 bytes of samples')}
