"""``fastps-lab live``: a page that shows asynchronous training while it happens, on real servers and workers.

`command` has its options. `session` runs the course of a visit: it owns the servers and workers of `cluster`
and passes what they report to the pages that listen (`hub`). `web` serves the page and takes its wishes.
"""
