"A convolutional network on series of many lengths, trained with train_on_batch."
import json
import time

import keras
import numpy as np

model = keras.Sequential([keras.Input((None, 4)), keras.layers.Conv1D(16, 5, activation='relu'),
                          keras.layers.Conv1D(16, 5, activation='relu'), keras.layers.GlobalMaxPooling1D(),
                          keras.layers.Dense(2)])
model.compile('adam', 'mse', jit_compile=True)
rng = np.random.default_rng(0)
lengths = 20 + np.arange(200)
rng.shuffle(lengths)
STEPS = 1500


def batch(length):
    return rng.normal(size=(32, length, 4)).astype('float32'), rng.normal(size=(32, 2)).astype('float32')


for length in (100, 220, 100): model.train_on_batch(*batch(length))
start = time.perf_counter()
for i in range(STEPS): model.train_on_batch(*batch(100 if lengths[i % 200] <= 100 else 220))
print(json.dumps({"items": STEPS * 32, "seconds": time.perf_counter() - start}))
