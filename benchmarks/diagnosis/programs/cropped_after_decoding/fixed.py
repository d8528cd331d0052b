"Small random crops from large pictures: each picture is decoded whole."
import json
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
folder = tempfile.mkdtemp()
for i in range(24):
    noise = tf.image.resize(rng.uniform(0, 255, size=(60, 80, 3)), (960, 1280))
    tf.io.write_file(f'{folder}/{i}.jpg', tf.io.encode_jpeg(tf.cast(noise, tf.uint8)))


def load(path):
    content = tf.io.read_file(path)
    corner = tf.random.uniform([2], 0, 1) * tf.cast(tf.io.extract_jpeg_shape(content)[:2] - 64, tf.float32)
    window = tf.concat([tf.cast(corner, tf.int32), [64, 64]], axis=0)
    picture = tf.ensure_shape(tf.image.decode_and_crop_jpeg(content, window, channels=3), (64, 64, 3))
    return tf.cast(picture, tf.float32) / 255


data = tf.data.Dataset.list_files(f'{folder}/*.jpg').repeat()
data = data.map(load, num_parallel_calls=tf.data.AUTOTUNE).batch(16).prefetch(tf.data.AUTOTUNE)
model = keras.Sequential([keras.Input((64, 64, 3)), keras.layers.Conv2D(4, 5, strides=4),
                          keras.layers.Flatten(), keras.layers.Dense(12)])
step = tf.function(lambda batch: tf.reduce_mean(model(batch)))
for i, batch in enumerate(data.take(65)):
    if i == 5: start = time.perf_counter()
    step(batch)
print(json.dumps({"items": 60 * 16, "seconds": time.perf_counter() - start}))
