"A table whose rows are normalised by a map, before they are put into batches."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x, y = rng.normal(3, 5, size=(40_000, 16)).astype('float32'), rng.normal(size=40_000).astype('float32')
mean, spread = x.mean(axis=0), x.std(axis=0)


def normalise(row, target): return (row - mean) / spread, target


data = tf.data.Dataset.from_tensor_slices((x, y))
data = data.batch(256).map(normalise, num_parallel_calls=2)
data = data.prefetch(tf.data.AUTOTUNE)
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, 'relu'), keras.layers.Dense(1)])
model.compile('adam', 'mse')
model.fit(data, verbose=0)
start = time.perf_counter()
model.fit(data, epochs=6, verbose=0)
print(json.dumps({"items": 6 * len(x), "seconds": time.perf_counter() - start}))
