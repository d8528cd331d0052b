"A loop that adds up its losses, which looked like a leak."
import json
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((100,)), *(keras.layers.Dense(1024, 'relu') for _ in range(4)),
                          keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam()
optimizer.build(model.trainable_variables)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(1280, 100)).astype('float32'), rng.normal(size=1280).astype('float32')
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(128).cache().prefetch(2)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape: loss = tf.reduce_mean((model(x)[:, 0] - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for epoch in range(16):
    if epoch == 1: start = time.perf_counter()
    total = tf.constant(0.)
    for x, y in data: total += train_step(x, y)
    print(f'epoch {epoch}: {float(total):.3f}')
print(json.dumps({"items": 15 * 1280, "seconds": time.perf_counter() - start}))
