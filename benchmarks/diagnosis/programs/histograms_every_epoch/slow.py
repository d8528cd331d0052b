"TensorBoard with all that can be switched on, and short epochs."
import json
import tempfile
import time

import keras
import numpy as np

rng = np.random.default_rng(0)
x, y = rng.normal(size=(640, 256)).astype('float32'), rng.integers(10, size=640)
model = keras.Sequential([keras.Input((256,)), *(keras.layers.Dense(256, 'relu') for _ in range(5)),
                          keras.layers.Dense(10)])
model.compile('adam', keras.losses.SparseCategoricalCrossentropy(from_logits=True))
board = keras.callbacks.TensorBoard(tempfile.mkdtemp(), histogram_freq=1, write_images=True)
EPOCHS = 20

model.fit(x, y, batch_size=64, callbacks=[board], epochs=2, verbose=0)
start = time.perf_counter()
model.fit(x, y, batch_size=64, callbacks=[board], epochs=EPOCHS, verbose=0)
print(json.dumps({"items": EPOCHS * 640, "seconds": time.perf_counter() - start}))
