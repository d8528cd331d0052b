"A NumPy function in the map that does little, beside a step that does much."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x, y = rng.normal(size=(1280, 400)).astype('float32'), rng.integers(10, size=1280)


def standardise(rows): return (rows - rows.mean(axis=1, keepdims=True)) / rows.std(axis=1, keepdims=True)


def prepare(rows, labels):
    rows = tf.numpy_function(standardise, [rows], tf.float32)
    return tf.ensure_shape(rows, (128, 400)), labels


data = tf.data.Dataset.from_tensor_slices((x, y)).batch(128).map(prepare, num_parallel_calls=2).prefetch(2)
model = keras.Sequential([keras.Input((400,)), *(keras.layers.Dense(1024, 'relu') for _ in range(5)),
                          keras.layers.Dense(10)])
model.compile('sgd', keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(data, verbose=0)
start = time.perf_counter()
model.fit(data, epochs=12, verbose=0)
print(json.dumps({"items": 12 * 1280, "seconds": time.perf_counter() - start}))
