"A loop that prints its loss every fifty steps."
import json
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((200,)), *(keras.layers.Dense(1024, 'tanh') for _ in range(4)),
                          keras.layers.Dense(5)])
optimizer = keras.optimizers.Adam()
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(1280, 200)).astype('float32'), rng.integers(5, size=1280)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(128).cache().repeat().prefetch(2)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape: loss = loss_of(y, model(x))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for i, (x, y) in enumerate(data.take(155)):
    if i == 5: start = time.perf_counter()
    loss = train_step(x, y)
    if i % 50 == 0: print(f'step {i}: loss {loss.numpy():.3f}')
print(json.dumps({"items": 150 * 128, "seconds": time.perf_counter() - start}))
