"Predictions for a table, asked for row by row."
import json
import time

import keras
import numpy as np

model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64, 'relu'),
                          keras.layers.Dense(3, 'softmax')])
table = np.random.default_rng(0).normal(size=(120, 20)).astype('float32')


def classes(rows):
    found = []
    for row in rows:
        found.append(int(np.argmax(model.predict(row[None], verbose=0))))
    return found


classes(table[:3])
start = time.perf_counter()
classes(table)
print(json.dumps({"items": len(table), "seconds": time.perf_counter() - start}))
