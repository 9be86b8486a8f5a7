"""A chat for browsers: this program only serves the page. Messages go from the page to the server and back.

streams serve --cors-origins http://127.0.0.1:8000
python app.py http://127.0.0.1:4000 8000      # then open http://127.0.0.1:8000/?name=ada
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import streams

ROOM = "room"
PAGE = Path(__file__).with_name("chat.html")


def create_room(url: str) -> None:
    """Create the room. It keeps the last 1,000 messages, for a week."""
    with streams.Client(url) as client:
        client.box(ROOM).create(cap_records=1000, ttl_ms=7 * 86_400_000, dedupe_node=False)


def page_server(url: str, port: int) -> ThreadingHTTPServer:
    """A web server with one page, which talks to the streams server at `url`."""
    page = PAGE.read_text().replace("{{server}}", url).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Write no line for each request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main(url: str, port: int) -> None:
    create_room(url)
    with page_server(url, port) as server:
        print(f"open http://127.0.0.1:{port}/?name=ada")
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
