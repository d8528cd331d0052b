"A compiled step with a temperature that a Python function anneals."
import json
import math
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(64, 'relu'), keras.layers.Dense(6)])
optimizer = keras.optimizers.Adam()
optimizer.build(model.trainable_variables)
rng = np.random.default_rng(0)
x = tf.constant(rng.normal(size=(128, 40)), tf.float32)
y = tf.one_hot(rng.integers(6, size=128), 6)
STEPS = 2500


@tf.function
def step(x, y, temperature):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(y, model(x) / temperature))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def temperature(i): return 0.5 + math.exp(-i / 500)


for i in range(STEPS + 5):
    if i == 5: start = time.perf_counter()
    step(x, y, tf.constant(temperature(i)))
print(json.dumps({"items": STEPS * 128, "seconds": time.perf_counter() - start}))
