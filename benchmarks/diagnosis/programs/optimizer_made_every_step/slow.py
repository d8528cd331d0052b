"A loop that makes its optimizer in each step, with the rate of that step."
import json
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((50,)), *(keras.layers.Dense(64, 'relu') for _ in range(4)),
                          keras.layers.Dense(1)])
rng = np.random.default_rng(0)
x, y = rng.normal(size=(6400, 50)).astype('float32'), rng.normal(size=(6400, 1)).astype('float32')
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat().prefetch(2)
STEPS = 100


@tf.function
def gradients_of(x, y):
    with tf.GradientTape() as tape: loss = tf.reduce_mean((model(x) - y) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def apply(gradients, rate):
    optimizer = keras.optimizers.Adam(rate)
    optimizer.apply(gradients, model.trainable_variables)


for i, (x, y) in enumerate(data.take(STEPS + 5)):
    if i == 5: start = time.perf_counter()
    apply(gradients_of(x, y), 0.001 / (1 + i / 1000))
print(json.dumps({"items": STEPS * 64, "seconds": time.perf_counter() - start}))
