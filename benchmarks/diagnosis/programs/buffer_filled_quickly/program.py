"A table shuffled as a whole before each epoch."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x, y = rng.normal(size=(10_240, 24)).astype('float32'), rng.normal(size=10_240).astype('float32')
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10_240).batch(512).prefetch(2)
model = keras.Sequential([keras.Input((24,)), *(keras.layers.Dense(768, 'relu') for _ in range(5)),
                          keras.layers.Dense(1)])
model.compile('sgd', 'mse')
model.fit(data, verbose=0)
start = time.perf_counter()
model.fit(data, epochs=4, verbose=0)
print(json.dumps({"items": 4 * 10_240, "seconds": time.perf_counter() - start}))
