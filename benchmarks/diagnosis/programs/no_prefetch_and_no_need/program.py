"Arrays in batches without prefetch, for a wide network."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x, y = rng.normal(size=(2048, 512)).astype('float32'), rng.integers(10, size=2048)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(128)
model = keras.Sequential([keras.Input((512,)), *(keras.layers.Dense(1024, 'relu') for _ in range(5)),
                          keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.01)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape: loss = loss_of(y, model(x))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for x, y in data.take(3): train_step(x, y)
start = time.perf_counter()
for _epoch in range(10):
    for x, y in data: loss = train_step(x, y)
print(json.dumps({"items": 10 * 2048, "seconds": time.perf_counter() - start}))
