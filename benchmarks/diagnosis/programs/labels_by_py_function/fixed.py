"Targets of a detector that py_function computes for each picture."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
boxes = rng.uniform(0, 1, size=(600, 6, 2)).astype('float32')
SIDE = np.linspace(0, 1, 12, dtype='float32')
GRID = np.stack(np.meshgrid(SIDE, SIDE), axis=-1).reshape(-1, 2)


def nearest(centres):
    squares = tf.reduce_sum((GRID[:, None] - centres[None]) ** 2, axis=-1)
    return tf.reduce_min(squares, axis=1)


def targets(centres):
    distances = nearest(centres)
    return tf.reshape(centres, [12]), tf.ensure_shape(distances, [144])


data = tf.data.Dataset.from_tensor_slices(boxes).map(targets, num_parallel_calls=4).batch(20).prefetch(2)
model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(64, 'relu'), keras.layers.Dense(144)])
model.compile('adam', 'mse')
model.fit(data, verbose=0)
start = time.perf_counter()
model.fit(data, epochs=30, verbose=0)
print(json.dumps({"items": 30 * 600, "seconds": time.perf_counter() - start}))
