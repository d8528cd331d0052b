"Predictions of many batches, joined to one tensor in the loop."
import json
import time

import keras
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(100, 'relu'), keras.layers.Dense(100)])
predict = tf.function(model)
x = rng.normal(size=(96_000, 16)).astype('float32')
data = tf.data.Dataset.from_tensor_slices(x).batch(64).cache()
for batch in data: predict(batch)

start = time.perf_counter()
predictions = []
for batch in data:
    predictions.append(predict(batch))
predictions = tf.concat(predictions, axis=0)
print(len(predictions))
print(json.dumps({"items": len(x), "seconds": time.perf_counter() - start}))
