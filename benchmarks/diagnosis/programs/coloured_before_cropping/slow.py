"Portraits that are changed in colour, flipped, and only then cropped."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
pictures = rng.integers(255, size=(24, 300, 400, 3), dtype=np.uint8)


def augment(picture):
    picture = tf.cast(picture, tf.float32) / 255
    picture = tf.image.random_brightness(picture, 0.1)
    picture = tf.image.random_contrast(picture, 0.8, 1.2)
    picture = tf.image.random_saturation(picture, 0.8, 1.2)
    picture = tf.image.random_flip_left_right(picture)
    return tf.image.random_crop(picture, (64, 64, 3))


data = tf.data.Dataset.from_tensor_slices(pictures).repeat()
data = data.map(augment, num_parallel_calls=tf.data.AUTOTUNE).batch(8).prefetch(2)
model = keras.Sequential([keras.Input((64, 64, 3)), keras.layers.Conv2D(4, 8, strides=8),
                          keras.layers.Flatten(),
                          keras.layers.Dense(4)])
step = tf.function(lambda batch: tf.reduce_mean(model(batch)))
for i, batch in enumerate(data.take(130)):
    if i == 10: start = time.perf_counter()
    step(batch)
print(json.dumps({"items": 120 * 8, "seconds": time.perf_counter() - start}))
