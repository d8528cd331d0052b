"""XTTS, the multilingual zero-shot voice, trained in TensorFlow with the accelerator kept busy."""
__version__ = "0.1.0"
