"A web server that does what real ones do on their bad days."
import random
import socket
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BODY = random.Random(0).randbytes(1_000_000)


@dataclass
class Plan:
    "What the server serves, and how badly."
    files: dict = field(default_factory=lambda: {'a.bin': BODY})
    most: int | None = None      # bytes of an answer before the connection ends
    reset: bool = False          # ends it with a reset instead of a goodbye
    limit: int | None = None     # answers; afterwards connections are closed without one
    hangs: int = 0               # answers that hang after `most` bytes
    ranges: bool = True          # understands Range
    if_range: bool = True        # understands If-Range
    lengths: bool = True         # announces them
    claim: int | None = None     # announces this length instead
    etag: str | None = '"1"'
    date: str | None = None
    redirects: dict = field(default_factory=dict)   # from, to
    linked: str | None = None    # X-Linked-ETag of a redirect
    statuses: list = field(default_factory=list)    # of the first answers
    asked: list = field(default_factory=list)       # the requests
    sent: int = 0                # bytes of bodies
    address: str = ''
    over: threading.Event = field(default_factory=threading.Event)


class Handler(BaseHTTPRequestHandler):
    "Answers as the plan says."
    def do_GET(self):
        plan = self.server.plan
        plan.asked.append(self)
        if plan.limit is not None:
            if not plan.limit: return
            plan.limit -= 1
        name = self.path.lstrip('/')
        if plan.statuses: return self.head(plan.statuses.pop(0))
        if name in plan.redirects:
            linked = {'X-Linked-ETag': f'"{plan.linked}"'} if plan.linked else {}
            return self.head(302, Location=f'/{plan.redirects[name]}', **linked)
        if name not in plan.files: return self.head(404)
        self.body(plan, plan.files[name])

    def body(self, plan, data):
        start, size = 0, plan.claim or len(data)
        marks = {k: v for k, v in (('ETag', plan.etag), ('Last-Modified', plan.date)) if v}
        asked, still = self.headers.get('Range'), self.headers.get('If-Range')
        if asked and plan.ranges and (not plan.if_range or still in (None, *marks.values())):
            start = int(asked[6:-1])
        if start >= size > 0: return self.head(416, **{'Content-Range': f'bytes */{size}'})
        if start: marks['Content-Range'] = f'bytes {start}-{size - 1}/{size}'
        if plan.lengths: marks['Content-Length'] = size - start
        self.head(206 if start else 200, **marks)
        part = data[start:][:plan.most]
        # before they are sent: a client that has them all does not wait for this thread
        plan.sent += len(part)
        try: self.wfile.write(part)
        except OSError: return
        if plan.hangs:
            plan.hangs -= 1
            plan.over.wait(20)
        if plan.reset and len(part) < size - start:
            time.sleep(0.02)   # what has not been read by then is lost
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))

    def head(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items(): self.send_header(name, str(value))
        self.end_headers()

    def finish(self):
        if self.server.plan.reset:
            self.wfile.close()
            self.connection.close()
        super().finish()

    def log_message(self, *_): pass


@contextmanager
def serving(**plan):
    "Yields the plan of a server that runs; it may be changed at any time."
    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        server.plan = Plan(**plan)
        server.plan.address = f'http://127.0.0.1:{server.server_port}'
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01}, daemon=True)
        thread.start()
        try: yield server.plan
        finally:
            server.plan.over.set()
            server.shutdown()
            thread.join()
