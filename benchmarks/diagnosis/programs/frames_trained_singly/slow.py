"An agent that plays from pictures: the frames of a minibatch are trained one after the other."
import json
import time

import keras
import numpy as np

model = keras.Sequential([
    keras.Input((40, 40, 4)), keras.layers.Conv2D(8, 8, strides=4, activation='relu'),
    keras.layers.Conv2D(16, 4, strides=2, activation='relu'), keras.layers.Flatten(),
    keras.layers.Dense(64, 'relu'), keras.layers.Dense(2)])
model.compile('adam', 'mse')
rng = np.random.default_rng(0)
frames = rng.normal(size=(1000, 40, 40, 4)).astype('float32')


def learn(size=32):
    rows = rng.integers(len(frames), size=size)
    states, targets = frames[rows], rng.normal(size=(size, 2)).astype('float32')
    loss = 0
    for i in range(size):
        loss += model.train_on_batch(states[i:i + 1], targets[i:i + 1])
    return loss


learn()
start = time.perf_counter()
for _ in range(60): learn()
print(json.dumps({"items": 60 * 32, "seconds": time.perf_counter() - start}))
