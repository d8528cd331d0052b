"A loop whose gradients are compiled, but not their application."
import json
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64, 'relu') for _ in range(20)),
                          keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam()
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(6400, 64)).astype('float32'), rng.integers(10, size=6400)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).cache().repeat().prefetch(2)


@tf.function
def gradients_of(x, y):
    with tf.GradientTape() as tape: loss = loss_of(y, model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)


def train_step(x, y):
    gradients = gradients_of(x, y)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


for i, (x, y) in enumerate(data.take(155)):
    if i == 5: start = time.perf_counter()
    train_step(x, y)
print(json.dumps({"items": 150 * 64, "seconds": time.perf_counter() - start}))
