"A GAN that compiles its models again in each batch, to freeze the discriminator."
import json
import time

import keras
import numpy as np

generator = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, 'relu'), keras.layers.Dense(16)])
discriminator = keras.Sequential([keras.Input((16,)), keras.layers.Dense(32, 'relu'),
                                  keras.layers.Dense(1, 'sigmoid')])
together = keras.Sequential([generator, discriminator])
discriminator.compile('adam', 'binary_crossentropy')
discriminator.train_on_batch(np.zeros((128, 16), 'float32'), np.zeros((128, 1)))
discriminator.trainable = False
together.compile('adam', 'binary_crossentropy')
rng = np.random.default_rng(0)
BATCHES = 800


def train_both(real):
    noise = rng.normal(size=(64, 8)).astype('float32')
    discriminator.train_on_batch(np.concatenate([real, generator(noise)]), np.repeat([1., 0.], 64)[:, None])
    together.train_on_batch(noise, np.ones((64, 1)))


for i in range(BATCHES + 2):
    if i == 2: start = time.perf_counter()
    train_both(rng.normal(size=(64, 16)).astype('float32'))
print(json.dumps({"items": BATCHES * 64, "seconds": time.perf_counter() - start}))
