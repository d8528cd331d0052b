"A convolutional network, trained by a loop of one's own, with a metric."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x, y = rng.normal(size=(1600, 28, 28, 1)).astype('float32'), rng.integers(10, size=1600)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).prefetch(1)
model = keras.Sequential([
    keras.Input((28, 28, 1)), keras.layers.Conv2D(6, 3, activation='relu'), keras.layers.AveragePooling2D(2),
    keras.layers.Conv2D(12, 3, activation='relu'), keras.layers.AveragePooling2D(2), keras.layers.Flatten(),
    keras.layers.Dense(60, 'relu'), keras.layers.Dense(10, 'softmax')])
optimizer = keras.optimizers.Adam()
objective = keras.losses.SparseCategoricalCrossentropy()
metric = keras.metrics.SparseCategoricalAccuracy()


def learn(images, labels):
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = objective(labels, predictions)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    metric.update_state(labels, predictions)
    return loss


for images, labels in data.take(10): learn(images, labels)
start = time.perf_counter()
for _epoch in range(3):
    for images, labels in data: total = learn(images, labels)
print(json.dumps({"items": 3 * 1600, "seconds": time.perf_counter() - start}))
