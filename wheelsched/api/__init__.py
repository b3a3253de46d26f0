"""HTTP in, problem+json out: the contract of API.md over a `NodeFace`, and nothing below it.

Seconds and RFC 3339 become integer milliseconds here and nowhere deeper; a client's JSON values (payload, result, error, progress)
pass through as the bytes they came in.

Read `routes.py` first: every call is one row there, and `/openapi.json` is made of the same rows and models. Then `app.py` (what happens
to any request), `schemas.py` (what a body may hold), `bodies.py` (what JSON is), and one of `jobs.py`, `queues.py`, `claims.py`,
`attempts.py`, `admin.py`. `connection.py` speaks HTTP/1.1 with aiohttp's parser and hides it from all the others; `hangup.py` says when
the answer to a claim did not reach its worker.

Decided: aiohttp's parser and stream, but neither its Application nor its Response. Paths with colons (`/v1/jobs/{id}:run`) do not fit
its router, and a request costs a third of what it does through Application, task, Response and CIMultiDict. What leaves a node is one
`transport.write` of joined bytes.
"""

from wheelsched.api.app import Api
from wheelsched.api.server import Server, serve

__all__ = ["Api", "Server", "serve"]
