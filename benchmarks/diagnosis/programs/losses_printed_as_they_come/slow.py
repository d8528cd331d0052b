"A loop around a compiled step, which keeps the losses and prints their mean in each step."
import json
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(64, 'relu'), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam()
optimizer.build(model.trainable_variables)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(64_000, 30)).astype('float32'), rng.normal(size=(64_000, 1)).astype('float32')
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).prefetch(4)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape: loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


losses = []
for i, (x, y) in enumerate(data):
    if i == 10: start = time.perf_counter()
    losses.append(train_step(x, y))
    print(f'step {i}: mean loss {np.mean(losses):.4f}', flush=True)
print(json.dumps({"items": 1990 * 32, "seconds": time.perf_counter() - start}))
