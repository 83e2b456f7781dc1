"""A local web server with a few files, which can break off, hang, or close connections."""

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Server(ThreadingHTTPServer):
    """Serve `files` below `url`. `requested` lists the paths of all requests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requested: list[str] = []
        self.break_after: int | None = None  # bytes of each answer
        self.delay = 0.0  # seconds before each answer

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

    def handle_error(self, request, client_address):
        """Say nothing of clients that have gone."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.server.requested.append(self.path)
        content = self.server.files.get(self.path)
        time.sleep(self.server.delay)
        if content is None:
            return self.send_error(404)
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.break_after])

    def log_message(self, *_):
        pass
