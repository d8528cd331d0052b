"Text from a recurrent network, one letter after the other, as in a well-known tutorial."
import json
import time

import keras
import tensorflow as tf

LETTERS = 60
embed = keras.layers.Embedding(LETTERS, 32)
cell = keras.layers.GRUCell(96)
head = keras.layers.Dense(LETTERS)
COUNT = 8000


@tf.function
def next_letter(letter, state):
    output, state = cell(embed(letter), state)
    scores = head(output) / 0.8
    return tf.random.categorical(scores, 1)[:, 0], state


def write(count):
    letter, state, text = tf.constant([1], tf.int64), tf.zeros((1, 96)), []
    for _ in range(count):
        letter, state = next_letter(letter, state)
        text.append(int(letter[0]))
    return text


write(20)
start = time.perf_counter()
write(COUNT)
print(json.dumps({"items": COUNT, "seconds": time.perf_counter() - start}))
