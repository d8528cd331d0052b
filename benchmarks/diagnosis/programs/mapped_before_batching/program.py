"Pictures resized one by one before they become batches, for a network that needs far longer."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
pictures, labels = rng.uniform(size=(640, 40, 40, 1)).astype('float32'), rng.integers(10, size=640)


def resize(picture, label): return tf.image.resize(picture, (28, 28)), label


data = tf.data.Dataset.from_tensor_slices((pictures, labels))
data = data.map(resize, num_parallel_calls=tf.data.AUTOTUNE).batch(32).prefetch(tf.data.AUTOTUNE)
model = keras.Sequential([
    keras.Input((28, 28, 1)), keras.layers.Conv2D(32, 5, activation='relu'),
    keras.layers.Conv2D(32, 5, activation='relu'), keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile('adam', keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(data, verbose=0)
start = time.perf_counter()
model.fit(data, epochs=4, verbose=0)
print(json.dumps({"items": 4 * 640, "seconds": time.perf_counter() - start}))
