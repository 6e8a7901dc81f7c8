"""Real processes that train one net by servers, by all-reduce, or by both, on one machine or two."""
