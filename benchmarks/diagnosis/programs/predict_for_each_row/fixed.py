"Predictions for a table, asked for row by row."
import json
import time

import keras
import numpy as np

model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64, 'relu'),
                          keras.layers.Dense(3, 'softmax')])
table = np.random.default_rng(0).normal(size=(96_000, 20)).astype('float32')


def classes(rows):
    return np.argmax(model.predict(rows, verbose=0), axis=1)


classes(table[:3])
start = time.perf_counter()
classes(table)
print(json.dumps({"items": len(table), "seconds": time.perf_counter() - start}))
