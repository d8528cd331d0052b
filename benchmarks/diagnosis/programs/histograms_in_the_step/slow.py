"A loop that writes histograms of all weights to TensorBoard in each step."
import json
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((100,)), *(keras.layers.Dense(128, 'relu') for _ in range(4)),
                          keras.layers.Dense(20)])
optimizer = keras.optimizers.Adam()
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(3200, 100)).astype('float32'), rng.integers(20, size=3200)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).cache().repeat().prefetch(2)
writer = tf.summary.create_file_writer(tempfile.mkdtemp())


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape: loss = loss_of(y, model(x))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def write(i):
    with writer.as_default(step=i):
        for weight in model.trainable_variables: tf.summary.histogram(weight.path, weight.value)


for i, (x, y) in enumerate(data.take(210)):
    if i == 10: start = time.perf_counter()
    train_step(x, y)
    write(i)
print(json.dumps({"items": 200 * 32, "seconds": time.perf_counter() - start}))
