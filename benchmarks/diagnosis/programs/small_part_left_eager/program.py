"Two compiled steps and, between them, a few operations that are not."
import json
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((300,)), *(keras.layers.Dense(1024, 'relu') for _ in range(4)),
                          keras.layers.Dense(300)])
optimizer = keras.optimizers.SGD(0.01)
rng = np.random.default_rng(0)
x = rng.normal(size=(1280, 300)).astype('float32')
data = tf.data.Dataset.from_tensor_slices(x).batch(128).cache().repeat().prefetch(2)


@tf.function
def train_step(x, weight):
    with tf.GradientTape() as tape: loss = weight * tf.reduce_mean((model(x) - x) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


weight = tf.constant(1.)
for i, x in enumerate(data.take(155)):
    if i == 5: start = time.perf_counter()
    loss = train_step(x, weight)
    weight = tf.clip_by_value(0.9 * weight + 0.1 * loss, 0.5, 1.5)   # calc_loss of the report
print(json.dumps({"items": 150 * 128, "seconds": time.perf_counter() - start}))
