"A feature of each element, by map_fn."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = rng.uniform(size=(64, 1500)).astype('float32')
data = tf.data.Dataset.from_tensor_slices(x).repeat().prefetch(2)
weights = keras.Variable(np.zeros(2, 'float32'))


def sixth_power(values):
    return values ** 6


@tf.function
def train_step(values):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((weights[0] * sixth_power(values) + weights[1] - values) ** 2)
    weights.assign_sub(0.1 * tape.gradient(loss, weights.value))


for i, values in enumerate(data.take(3005)):
    if i == 5: start = time.perf_counter()
    train_step(values)
print(json.dumps({"items": 3000 * 1500, "seconds": time.perf_counter() - start}))
