"Cheap compilation where little is computed: for quick tests, their processes, and (printed) for pages."
import os

# On a CPU XLA takes four times as long to compile with its fusion emitters and LLVM's optimizations.
XLA = '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false ' \
      '--xla_cpu_parallel_codegen_split_count=1'


def choose():
    "For this process and those it starts; before TensorFlow is imported."
    os.environ.setdefault('XLA_FLAGS', XLA)

def keep_functions():
    """A seed of TensorFlow that is set once more leaves compiled functions as they are.

    TensorFlow throws all of them away, to begin operations anew that draw numbers from a state (the library
    has none); to build a function of 400 operations again takes 80 ms. Keras's own seeds are not touched."""
    import tensorflow as tf
    if hasattr(tf.random.set_seed, 'last'): return
    real = tf.random.set_seed
    def set_seed(seed):
        if seed != set_seed.last: real(seed)
        set_seed.last = seed
    set_seed.last = None
    tf.random.set_seed = set_seed


if __name__ == '__main__': print(XLA)
