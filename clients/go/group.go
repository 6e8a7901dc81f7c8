package fastps

import (
	"context"
	"time"

	pb "fastps.example/go/fastpsv1"
)

// Mode says how the workers of a group wait for each other: Free, Bounded or Sync.
type Mode interface{ wire() *pb.Mode }

// Free workers do not wait.
type Free struct{}

// Bounded keeps each worker at most Staleness steps ahead of the slowest.
type Bounded struct{ Staleness uint64 }

// Sync makes each version from the gradients of Workers workers, of Workers + Backup that take part. Pushes must be
// based on versions, and are answered when the next version exists; later ones are refused with StalePush.
type Sync struct {
	Workers, Backup int
	// Deterministic adds the gradients in the order of ranks; Sum steps with their sum instead of their mean.
	Deterministic, Sum bool
}

func (Free) wire() *pb.Mode { return &pb.Mode{Kind: pb.ModeKind_MODE_FREE} }

func (m Bounded) wire() *pb.Mode {
	return &pb.Mode{Kind: pb.ModeKind_MODE_BOUNDED, Staleness: m.Staleness}
}

func (m Sync) wire() *pb.Mode {
	return &pb.Mode{Kind: pb.ModeKind_MODE_SYNC, Workers: uint32(m.Workers), Backup: uint32(m.Backup),
		Deterministic: m.Deterministic, Sum: m.Sum}
}

// Place is a worker's place in a group.
type Place struct {
	// Group of tensors; default: "default".
	Group string
	Mode  Mode
	// Rank is the worker's position in the order of workers; nil: that of arrival.
	Rank *uint32
	// Name is shown to the others that wait for this worker.
	Name string
}

type place struct {
	Place
	group uint32
	// Steps taken, and those that shard 0 has acknowledged.
	clock, acknowledged uint64
	// The session has ended: the other workers continue without this one until it joins again.
	lost bool
}

func errPlaceLost() *Error {
	return newError(Lease, "the worker's lease ran out, and the others continued without it: it must Join its group again")
}

const answerMargin = 100 * time.Millisecond

// Join takes a place in a group, of which a tensor must be registered. All its workers must name the same mode.
func (c *Client) Join(ctx context.Context, wanted Place) error {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	if wanted.Group == "" {
		wanted.Group = "default"
	}
	if wanted.Mode == nil {
		return newError(Config, "a place has a mode").expected("Free, Bounded or Sync", "nil")
	}
	number, err := c.group(ctx, wanted.Group)
	if err != nil {
		return err
	}
	p := &place{Place: wanted, group: number}
	for i, l := range p.concerned(c.links) {
		clock, err := c.joinOne(ctx, l, p)
		if err != nil {
			// No worker may wait for one that has not joined everywhere.
			for _, joined := range c.links[:i] {
				c.leaveOne(ctx, joined, number)
			}
			return err
		}
		if i == 0 {
			p.clock, p.acknowledged = clock, clock
		}
	}
	c.worker.joined(wanted)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.places[wanted.Group] = p
	return nil
}

// concerned lists the shards that know the place: only those of Sync are known beside shard 0.
func (p *place) concerned(links []*link) []*link {
	if _, sync := p.Mode.(Sync); sync {
		return links
	}
	return links[:1]
}

// group finds a group's number in the map.
func (c *Client) group(ctx context.Context, name string) (uint32, error) {
	if p := c.placeIn(name); p != nil {
		return p.group, nil
	}
	if err := c.fetch(ctx, nil); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.tensors {
		if e.spec.Group == name {
			return e.group, nil
		}
	}
	return 0, newError(UnknownTensor, "no tensor of group %q is registered", name)
}

func (c *Client) placeIn(group string) *place {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.places[group]
}

// joinOne takes a place at one shard, in a new session if the present one has ended.
func (c *Client) joinOne(ctx context.Context, l *link, p *place) (uint64, *Error) {
	for {
		answer, err := l.join(ctx, p)
		if err == nil {
			return answer.Clock, nil
		}
		if err.Kind != Lease {
			return 0, err
		}
		if wait(ctx, answerMargin/4); ctx.Err() != nil {
			return 0, err
		}
	}
}

func (l *link) join(ctx context.Context, p *place) (*pb.JoinResponse, *Error) {
	return unary(ctx, l, l.control.Join, func(client uint64) *pb.JoinRequest {
		return &pb.JoinRequest{Client: client, Group: p.group, Mode: p.Mode.wire(), Rank: p.Rank, Name: p.Name}
	})
}

// rejoin takes the places again when a session begins, in case the server has forgotten them. Lost ones are left to
// the worker, for which nobody waits until then.
func (c *Client) rejoin(ctx context.Context, l *link) {
	c.mu.Lock()
	var held []*place
	for _, p := range c.places {
		if !p.lost && len(p.concerned(c.links)) > l.shard {
			held = append(held, p)
		}
	}
	c.mu.Unlock()
	for _, p := range held {
		l.mu.Lock()
		request := &pb.JoinRequest{Client: l.incarnation, Group: p.group, Mode: p.Mode.wire(), Rank: p.Rank, Name: p.Name}
		l.mu.Unlock()
		if answer, err := l.control.Join(l.metadata(ctx), request); err == nil && l.shard == 0 {
			c.mu.Lock()
			// A restarted server starts at 0; otherwise only the last report may be missing.
			if answer.Clock < p.acknowledged {
				p.clock = answer.Clock
			}
			p.acknowledged = answer.Clock
			c.mu.Unlock()
		}
	}
}

// losePlaces marks the places that others wait for as lost, and returns the numbers of their groups.
func (c *Client) losePlaces() map[uint32]bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	lost := map[uint32]bool{}
	for _, p := range c.places {
		if _, free := p.Mode.(Free); !free {
			p.lost = true
			lost[p.group] = true
		}
	}
	return lost
}

func (c *Client) hasPlaces() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.places) > 0
}

func (c *Client) placeIsLost(group uint32) bool {
	return c.anyPlace(func(p *place) bool { return p.group == group && p.lost })
}

func (c *Client) isSync(group uint32) bool {
	return c.anyPlace(func(p *place) bool { _, sync := p.Mode.(Sync); return p.group == group && sync })
}

func (c *Client) anyPlace(is func(*place) bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.places {
		if is(p) {
			return true
		}
	}
	return false
}

// Advance reports that the worker has taken a step, and waits until it may take the next one. The step counts even if
// the context ends first; then 0 steps wait on.
func (c *Client) Advance(ctx context.Context, group string, steps uint64) error {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	p := c.placeIn(group)
	if p == nil {
		return newError(Config, "the worker has no place in group %q: Join it first", group)
	}
	c.mu.Lock()
	p.clock += steps
	c.mu.Unlock()
	c.worker.advance(group, steps)
	l := c.links[0]
	var behind []string
	for {
		answer, refusal := unary(ctx, l, l.control.Advance, func(client uint64) *pb.AdvanceRequest {
			c.mu.Lock()
			defer c.mu.Unlock()
			request := &pb.AdvanceRequest{Client: client, Group: p.group, Clock: p.clock}
			deadline, _ := ctx.Deadline()
			left := max(time.Until(deadline)-answerMargin, 0)
			if behind == nil {
				left /= 2 // so that the workers behind are known at the deadline
			}
			request.WaitMs = uint32(min(left, 20*time.Second).Milliseconds())
			return request
		})
		switch {
		case refusal == nil && answer.Ready:
			c.mu.Lock()
			defer c.mu.Unlock()
			p.acknowledged = p.clock
			return nil
		case refusal == nil:
			behind = append([]string{}, answer.Behind...)
		case refusal.Kind == Lease:
			// The server restarted, or the lease expired: the place is taken again.
			if wait(ctx, answerMargin); ctx.Err() != nil {
				return refusal
			}
			clock, err := c.joinOne(ctx, l, p)
			if err != nil {
				return err
			}
			c.mu.Lock()
			p.clock, p.acknowledged, p.lost = clock+steps, clock, false
			c.mu.Unlock()
		case refusal.Kind != Deadline:
			return refusal
		}
		if wait(ctx, firstPause); ctx.Err() != nil {
			late := ended(ctx, l.address, nil)
			return late.of("", 0).expected("the step of each worker", behind)
		}
	}
}

// Leave gives the place back. A server that cannot be reached finds out when the lease ends.
func (c *Client) Leave(ctx context.Context, group string) error {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	c.mu.Lock()
	p := c.places[group]
	delete(c.places, group)
	c.mu.Unlock()
	if p != nil {
		c.worker.joined(Place{})
		for _, l := range p.concerned(c.links) {
			c.leaveOne(ctx, l, p.group)
		}
	}
	return nil
}

func (c *Client) leaveOne(ctx context.Context, l *link, group uint32) {
	ctx, cancel := context.WithTimeout(ctx, goodbyeTime)
	defer cancel()
	_, _ = unary(ctx, l, l.control.Leave, func(client uint64) *pb.LeaveRequest {
		return &pb.LeaveRequest{Client: client, Group: group}
	})
}
