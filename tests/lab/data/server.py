"""A web server of a few files, which can be told to misbehave in the ways that servers do."""

import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Server(ThreadingHTTPServer):
    """Serves `files` below its `url`; `asked` holds the path and the Range header of every request."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.knows_ranges = True
        self.refuses_ranges = False
        self.break_after: int | None = None  # bytes of each answer
        self.content_range = "bytes {start}-{end}/{size}"
        self.skew = 0  # added to where a range begins

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        self.thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        content = self.server.files.get(self.path)
        if content is None:
            return self.send_error(404)
        if wanted and self.server.refuses_ranges:
            return self.send_error(416)
        start = 0
        if wanted and self.server.knows_ranges:
            found = re.fullmatch(r"bytes=(\d+)-", wanted)
            assert found
            start = int(found[1]) + self.server.skew
            self.send_response(206)
            size = len(content)
            self.send_header("Content-Range", self.server.content_range.format(start=start, end=size - 1, size=size))
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: self.server.break_after])

    def log_message(self, *_):
        pass
