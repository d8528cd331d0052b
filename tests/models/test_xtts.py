"A model as a folder, and the cost of its training step."
import numpy as np
import tensorflow as tf

from xtts_nb.files import save_weights
from xtts_nb.models.xtts import step_flops, XTTS
from xtts_nb.train.step import token_losses, total_loss

def test_a_model_and_what_came_with_it_are_loaded_as_they_were_saved(xtts, tmp_path):
    "Settings of coqui-tts beside it and tensors of no network; also where it is saved in its own place."
    saved = tmp_path / 'm'
    xtts.save(saved)
    (saved / 'coqui.json').write_text('{"a": 1}')
    path = saved / 'model.safetensors'
    save_weights(path, {'coqui/more': np.ones(3, np.float32)}, others_from=path)
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    again = XTTS.load(saved)
    assert again.hifigan is None and again.config == xtts.config and list(again.weights) == list(xtts.weights)
    assert all(np.array_equal(v, xtts.weights[k]) for k, v in again.weights.items())
    for folder in (saved, tmp_path / 'other'):
        again.save(folder)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    XTTS(again.config, again.tokenizer, again.dvae, again.gpt).save(tmp_path / 'new')
    made = {p.name for p in (tmp_path / 'new').iterdir()}
    assert made == {'config.yaml', 'tokenizer.json', 'model.safetensors'}
    again.save(tmp_path / 'third', {k: v.numpy() + 1 for k, v in again.weights.items()})
    third = XTTS.load(tmp_path / 'third', parity=True)
    assert all(np.array_equal(v, again.weights[k].numpy() + 1) for k, v in third.weights.items())
    assert third.gpt.parity and not again.gpt.parity

def test_flops_agree_with_what_tensorflow_counts(small):
    "The whole graph of a training step, with norms and losses, is at most 2 % above the formula."
    from tensorflow.python.profiler.model_analyzer import profile
    from tensorflow.python.profiler.option_builder import ProfileOptionBuilder

    from xtts_nb.models.gpt import GPT
    config = small.replace(model={'gpt': {'hidden_dim': 256, 'num_heads': 8}})
    net, B, T, S = GPT(config, 3), 2, 20, 40
    shapes = dict(text=(B, T), text_length=(B,), codes=(B, S), code_length=(B,),
                  reference=(B, config.data.reference_frames, 80), weight=(B,))
    batch = {k: tf.TensorSpec(v, tf.float32 if k in ('reference', 'weight') else tf.int32)
             for k, v in shapes.items()}
    def step(batch):
        with tf.GradientTape() as tape: loss = total_loss(token_losses(net, batch))
        return tape.gradient(loss, net.trainable_variables)
    graph = tf.function(step).get_concrete_function(batch).graph
    options = ProfileOptionBuilder(ProfileOptionBuilder.float_operation()).with_empty_output().build()
    counted = profile(graph, options=options).total_float_ops
    assert 0.98 < step_flops(config, B, T, S) / counted < 1
