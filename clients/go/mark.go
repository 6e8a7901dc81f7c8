package fastps

import (
	"context"
	"fmt"
	"time"
	"unicode/utf8"

	pb "fastps.example/go/fastpsv1"
)

const (
	// history is the capability of servers that keep history.
	history = "history"
	// maxMarkBytes is the length of the longest name of a mark.
	maxMarkBytes = 256
	// maxHold is how long writes wait for a mark of all shards.
	maxHold = 2 * time.Second
	// holdPause passes before a mark that could not be made is tried again.
	holdPause = 200 * time.Millisecond
)

// Mark names this moment in the logs of servers that keep history (--keep-history), on all shards at once: fastps rewind
// --to-mark NAME goes back to it exactly. Writes wait meanwhile, some milliseconds. A name has 1 to 256 bytes of UTF-8,
// without control characters; of several marks with one name the newest counts. With tokens it needs the role admin. The
// error is Precondition where a server keeps no history, and Deadline where the servers were busy with a snapshot.
func (c *Client) Mark(ctx context.Context, name string) error {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	if err := checkMark(name); err != nil {
		return err
	}
	for _, l := range c.links {
		l.mu.Lock()
		marks := l.marks
		l.mu.Unlock()
		if !marks {
			err := newError(Precondition, "the server keeps no history, which marks belong to").of("", l.shard)
			return err.expected("servers with --keep-history, of this version", l.address)
		}
	}
	for {
		// A mark of all shards has one number, and an attempt that failed on one of them does not count.
		cut := random()
		err := c.markAll(ctx, name, cut)
		if err == nil {
			return nil
		}
		c.release(ctx, cut)
		pause := max(holdPause, err.RetryAfter)
		if end, ok := ctx.Deadline(); ok && time.Until(end) <= pause || err.Kind != Deadline && !err.passes() {
			return err
		}
		if wait(ctx, jitter(pause)); ctx.Err() != nil {
			return ended(ctx, c.links[0].address, err)
		}
	}
}

func checkMark(name string) error {
	if len(name) < 1 || len(name) > maxMarkBytes {
		return newError(Config, "invalid name of a mark").expected(
			fmt.Sprintf("1 to %d bytes of UTF-8", maxMarkBytes), fmt.Sprintf("%d bytes", len(name)))
	}
	if !utf8.ValidString(name) {
		return newError(Config, "invalid name of a mark").expected("UTF-8", fmt.Sprintf("%q", name))
	}
	return nil
}

// markAll holds the writes of all shards, and has each note the name.
func (c *Client) markAll(ctx context.Context, name string, cut uint64) *Error {
	// A shard that refuses for longer would hold up the writes of the others without need.
	held, cancel := context.WithTimeout(ctx, maxHold/2)
	defer cancel()
	for _, l := range c.links {
		// Every client uses this order, so that two never wait for each other.
		if err := l.hold(held, cut, maxHold); err != nil {
			return err
		}
	}
	failures := make(chan *Error, len(c.links))
	for _, l := range c.links {
		go func() {
			_, err := unary(ctx, l, l.control.Mark, func(uint64) *pb.MarkRequest { return &pb.MarkRequest{Name: name, Cut: cut} })
			failures <- err
		}()
	}
	var failed *Error
	for range c.links {
		if err := <-failures; err != nil && failed == nil {
			failed = err
		}
	}
	return failed
}

// release lets the writes of all shards pass before their hold is over.
func (c *Client) release(ctx context.Context, cut uint64) {
	// Also for a caller that has given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), holdPause)
	defer cancel()
	for _, l := range c.links {
		_ = l.hold(ctx, cut, 0)
	}
}

func (l *link) hold(ctx context.Context, cut uint64, limit time.Duration) *Error {
	_, err := unary(ctx, l, l.control.Hold, func(uint64) *pb.HoldRequest {
		return &pb.HoldRequest{Cut: cut, HoldMs: uint32(limit.Milliseconds())}
	})
	return err
}
