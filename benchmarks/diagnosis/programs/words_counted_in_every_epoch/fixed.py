"A PyDataset that counts the words of its texts, in Python and in every epoch."
import json
import time

import keras
import numpy as np

WORDS, ROWS = 200, 128
rng = np.random.default_rng(0)
vocabulary = {f'word{i}': i for i in range(WORDS)}
texts = [' '.join(f'word{i}' for i in rng.integers(WORDS, size=120)) for _ in range(20 * ROWS)]
labels = rng.integers(2, size=len(texts))


all_counts = np.zeros((len(texts), WORDS), 'float32')
for row, text in enumerate(texts):
    for word in text.split():
        all_counts[row, vocabulary[word]] += 1


class Counts(keras.utils.PyDataset):
    def __len__(self): return 20

    def __getitem__(self, batch):
        rows = range(batch * ROWS, (batch + 1) * ROWS)
        return all_counts[rows.start:rows.stop], labels[rows.start:rows.stop]


counts = Counts()
model = keras.Sequential([keras.Input((WORDS,)), keras.layers.Dense(16, 'relu'),
                          keras.layers.Dense(1, 'sigmoid')])
model.compile('adam', 'binary_crossentropy')
model.fit(counts, verbose=0)
start = time.perf_counter()
model.fit(counts, epochs=25, verbose=0)
print(json.dumps({"items": 25 * len(texts), "seconds": time.perf_counter() - start}))
