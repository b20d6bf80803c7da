"""A server of one file on this machine, which resumes, breaks off and errs as a test wants it to."""

import contextlib
import http.server
import threading
from collections.abc import Iterator


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`, behaves as a test wants it to, and remembers the ranges that were requested."""

    content: bytes
    ranges = True
    tag = '"first"'
    breaks_after: list[int]
    asked: list[str | None]
    status = 200

    def handle_error(self, request, client_address):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.asked.append(self.headers.get("Range"))
        if server.status != 200:
            self.send_error(server.status)
            return
        content, start = server.content, 0
        wanted = self.headers.get("Range")
        if wanted and server.ranges and self.headers.get("If-Range", server.tag) == server.tag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(content) - start))
        if server.tag:
            self.send_header("ETag", server.tag)
        self.end_headers()
        limit = server.breaks_after.pop(0) if server.breaks_after else len(content)
        self.wfile.write(content[start : start + limit])

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(content: bytes) -> Iterator[Server]:
    """A server that runs until the block ends. It answers every path with the content."""
    running = Server(("127.0.0.1", 0), Handler)
    running.content, running.breaks_after, running.asked = content, [], []
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield running
    finally:
        running.shutdown()
        thread.join()
        running.server_close()
