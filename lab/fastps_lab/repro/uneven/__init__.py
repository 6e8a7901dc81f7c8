"""Workers of very different speeds on one store: the claim `uneven`."""
