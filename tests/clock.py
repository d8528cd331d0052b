"A clock that moves only when a test moves it."

class Clock:
    "Stands for the module `time` in one module: `monkeypatch.setattr(module, 'time', Clock())`."
    def __init__(self, now: float = 100.): self.now, self.cpu = now, now
    def perf_counter(self) -> float: return self.now
    monotonic = perf_counter
    def process_time(self) -> float: return self.cpu
    def sleep(self, seconds: float): self.now += seconds

    def each(self, seconds, value=None):
        "The values of an iterator, each after a number of seconds."
        for s in seconds:
            self.sleep(s)
            yield value
