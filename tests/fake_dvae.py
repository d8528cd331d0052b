"A DVAE for tests of `prepare`: no weights to train, quick to start, and importable by child processes."
import os
import resource
import signal
import time

import numpy as np
import safetensors.numpy
import tensorflow as tf

class Fake:
    "Codes by loudness; another `gain` makes other codes, other `stats` other mels."
    def __init__(self, gain=1., stats=5.): self.gain, self.mel_stats = gain, np.full(80, stats, np.float32)
    @tf.autograph.experimental.do_not_convert
    def encode(self, mel):
        return tf.cast(tf.clip_by_value(tf.reduce_mean(mel, -1)[:, ::4] * -2 * self.gain, 0, 31), tf.int32)
    def save(self, path):
        values = {'gain': np.float32([self.gain]), 'mel_stats': self.mel_stats}
        path.write_bytes(safetensors.numpy.save(values))
    @classmethod
    def load(cls, path, config):
        values = safetensors.numpy.load_file(path)
        return cls(float(values['gain'][0]), float(values['mel_stats'][0]))

class Slow(Fake):
    "The same codes, slowly enough to be killed in the middle."
    def encode(self, mel):
        wait = tf.numpy_function(lambda: (time.sleep(0.03), np.int32(0))[1], [], tf.int32)
        with tf.control_dependencies([wait]): return tf.identity(super().encode(mel))

class Dying(Fake):
    "The same codes; the process is killed at the seventh clip, as by the system when memory runs out."
    left = 7
    def encode(self, mel):
        def count():
            self.left -= 1
            if not self.left: os.kill(os.getpid(), signal.SIGKILL)
            return np.int32(0)
        with tf.control_dependencies([tf.numpy_function(count, [], tf.int32)]):
            return tf.identity(super().encode(mel))

def largest_file(size: int):
    "No file of this process may grow beyond `size` bytes, which fails as a full disk does."
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

class OnAFullDisk(Fake):
    @classmethod
    def load(cls, path, config):
        largest_file(120_000)
        return super().load(path, config)

class Odd(Fake):
    @classmethod
    def load(cls, path, config): raise ValueError('these weights are odd')

load = Fake.load
