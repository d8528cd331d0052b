"Depth pictures that are changed at random, by a map as it is written at first."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
pictures = rng.integers(255, size=(256, 120, 90, 4), dtype=np.uint8)
heights = rng.normal(size=256).astype('float32')


def augment(picture, height):
    picture = tf.image.random_flip_left_right(tf.cast(picture, tf.float32) / 255)
    picture = picture[..., :3] + tf.random.normal((120, 90, 3), stddev=0.01)
    picture = tf.image.random_saturation(tf.clip_by_value(picture, 0, 1), 0.8, 1.2)
    picture = tf.image.random_hue(picture, 0.1)
    return picture[::4, ::4], height


data = tf.data.Dataset.from_tensor_slices((pictures, heights)).repeat()
data = data.map(augment)
data = data.batch(32).prefetch(2)
model = keras.Sequential([keras.Input((30, 23, 3)), keras.layers.Flatten(), keras.layers.Dense(16, 'relu'),
                          keras.layers.Dense(1)])
model.compile('adam', 'mse')
model.fit(data, steps_per_epoch=10, verbose=0)
start = time.perf_counter()
model.fit(data, steps_per_epoch=90, verbose=0)
print(json.dumps({"items": 90 * 32, "seconds": time.perf_counter() - start}))
