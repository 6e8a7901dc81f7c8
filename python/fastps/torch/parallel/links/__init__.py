"""Messages between the parts of a replica: bytes, connections, and the mailbox where a part waits."""
