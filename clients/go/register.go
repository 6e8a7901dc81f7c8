package fastps

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	pb "fastps.example/go/fastpsv1"

	"google.golang.org/protobuf/proto"
)

const (
	// registrations is the capability of servers whose calls register several tensors at a time.
	registrations    = "registrations"
	maxRegistered    = 4096
	maxRegisterBytes = 2 << 20 // of the specifications and places of a call
	renewReservation = 5 * time.Second
	slicesInFlight   = 1024
	bytesInFlight    = 16 << 20
)

// Registration is a tensor with its initial values, in row-major order.
type Registration struct {
	Tensor Tensor
	Values []float32
}

// wanted is a tensor to be registered; entry and reservation are set once it has places.
type wanted struct {
	spec        *pb.TensorSpec
	values      []float32
	entry       *entry
	reservation uint64
}

// Register creates a tensor with these values, unless it exists with the same specification; it reports whether it
// created it. A tensor of another specification is a Precondition error.
func (c *Client) Register(ctx context.Context, tensor Tensor, values []float32) (bool, error) {
	created, err := c.register(ctx, []Registration{{tensor, values}})
	return created == 1, err
}

// RegisterAll creates tensors of different names, unless they exist with the same specifications: up to 4096 of them in a
// few messages to each server. Values and names are checked before the first is registered. After an error each tensor is
// there whole or not at all; the error names the first that was refused, and the same call again registers the rest.
func (c *Client) RegisterAll(ctx context.Context, all []Registration) error {
	_, err := c.register(ctx, all)
	return err
}

func (c *Client) register(ctx context.Context, all []Registration) (int, error) {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return 0, err
	}
	defer cancel()
	open := make([]*wanted, len(all))
	names := map[string]bool{}
	for i, one := range all {
		if names[one.Tensor.Name] {
			return 0, newError(Config, "a tensor is named twice in one registration").of(one.Tensor.Name, -1)
		}
		names[one.Tensor.Name] = true
		if err := one.check(); err != nil {
			return 0, err
		}
		open[i] = &wanted{spec: one.Tensor.spec(), values: one.Values}
	}
	created, exist := 0, 0
	for _, page := range c.pages(open) {
		made, there, err := c.registerPage(ctx, page)
		created, exist = created+made, exist+there
		if err != nil && len(all) > 1 {
			told := *err
			told.Message = fmt.Sprintf("%s; of the %d tensors of this call, %d are known to be registered", err.Message, len(all), exist)
			return created, &told
		}
		if err != nil {
			return created, err.of(all[0].Tensor.Name, -1)
		}
	}
	return created, nil
}

func (r Registration) check() *Error {
	n := 1
	for _, dim := range r.Tensor.Shape {
		if dim < 0 {
			return newError(Shape, "a dimension is negative").of(r.Tensor.Name, -1).expected("0 or more", dim)
		}
		n *= dim
	}
	if n != len(r.Values) {
		err := newError(Shape, "the values do not fill the shape").of(r.Tensor.Name, -1)
		return err.expected(n, len(r.Values))
	}
	return checkFinite(r.Tensor.Name, "the value", r.Values, 0)
}

// pages divides tensors into those of one message each; servers of an earlier version take one at a time.
func (c *Client) pages(open []*wanted) [][]*wanted {
	most := maxRegistered
	for _, l := range c.links {
		l.mu.Lock()
		if !l.registers {
			most = 1
		}
		l.mu.Unlock()
	}
	var pages [][]*wanted
	length := 0
	for _, w := range open {
		bytes := proto.Size(w.spec) + 64 + 24*max(1, ceil(len(w.values), sliceLen))
		last := len(pages) - 1
		if last < 0 || len(pages[last]) == most || length+bytes > maxRegisterBytes {
			pages, length = append(pages, nil), 0
			last++
		}
		pages[last] = append(pages[last], w)
		length += bytes
	}
	return pages
}

// registerPage returns how many tensors it has created, and how many are known to exist. It waits for those that another
// client registers once its own are there, so that two clients never wait for each other.
func (c *Client) registerPage(ctx context.Context, open []*wanted) (created, exist int, err *Error) {
	for {
		placed, others, pause, refusal := c.place(ctx, open)
		exist += len(open) - len(placed) - len(others)
		if refusal == nil {
			refusal = c.fill(ctx, placed)
		}
		if refusal != nil {
			c.drop(placed)
			return created, exist, refusal
		}
		if refusal := c.commit(ctx, placed); refusal != nil {
			// A lost answer may have been a success.
			if again, others, _, err := c.place(ctx, placed); err != nil || len(again)+len(others) > 0 {
				return created, exist, refusal
			}
		}
		for _, w := range placed {
			c.keep(w.entry)
		}
		created, exist = created+len(placed), exist+len(placed)
		if len(others) == 0 {
			return created, exist, nil
		}
		open = others
		if wait(ctx, pause); ctx.Err() != nil {
			return created, exist, ended(ctx, c.links[0].address, nil).of(open[0].spec.Name, -1)
		}
	}
}

// place asks shard 0 for places: returns the tensors that got some, and those that another client is registering. The
// others exist, and are kept.
func (c *Client) place(ctx context.Context, open []*wanted) (placed, others []*wanted, pause time.Duration, err *Error) {
	if len(open) == 0 {
		return nil, nil, 0, nil
	}
	ask := &pb.RegisterRequest{}
	for _, w := range open {
		ask.Specs = append(ask.Specs, w.spec)
	}
	if len(open) == 1 {
		ask.Spec, ask.Specs = open[0].spec, nil
	}
	var answer *pb.RegisterResponse
	for {
		answer, err = unary(ctx, c.links[0], c.links[0].control.Register, func(client uint64) *pb.RegisterRequest {
			ask.Client = client
			return ask
		})
		if err == nil || err.Kind != Lease || ctx.Err() != nil {
			break
		}
		wait(ctx, 10*firstPause) // for the new session
	}
	if err != nil {
		return nil, open, 0, err
	}
	outcomes := answer.Outcomes
	if len(open) == 1 {
		outcomes = []*pb.RegisterResponse{answer}
	}
	if len(outcomes) != len(open) {
		return nil, open, 0, newError(Frame, "the server answers for other tensors").of("", 0).expected(len(open), len(outcomes))
	}
	for i, outcome := range outcomes {
		w := open[i]
		if outcome.UnderWay {
			others = append(others, w)
			pause = max(pause, time.Duration(max(outcome.RetryAfterMs, 1))*time.Millisecond)
			continue
		}
		e, err := newEntry(w.spec, outcome.Placement, len(c.links))
		if err == nil && !outcome.Exists && outcome.Reservation == 0 {
			err = newError(Frame, "the server gave no reservation").of(w.spec.Name, 0)
		}
		if err != nil {
			return placed, append(others, open[i:]...), 0, err
		}
		if outcome.Exists {
			c.keep(e)
			continue
		}
		w.entry, w.reservation = e, outcome.Reservation
		placed = append(placed, w)
	}
	return placed, others, pause, nil
}

// onShards calls for the tensors that have slices on a shard, for all shards at the same time.
func (c *Client) onShards(placed []*wanted, call func(l *link, here []*wanted) *Error) *Error {
	failed := make([]*Error, len(c.links))
	var calls sync.WaitGroup
	for shard, l := range c.links {
		var here []*wanted
		for _, w := range placed {
			if slices.Contains(w.entry.shards, shard) {
				here = append(here, w)
			}
		}
		if len(here) > 0 {
			calls.Add(1)
			go func() {
				defer calls.Done()
				failed[shard] = call(l, here)
			}()
		}
	}
	calls.Wait()
	for shard, err := range failed {
		if err != nil {
			return err.of("", shard)
		}
	}
	return nil
}

// reserve takes the memory on the shards.
func (c *Client) reserve(ctx context.Context, placed []*wanted) *Error {
	return c.onShards(placed, func(l *link, here []*wanted) *Error {
		ask := &pb.ReserveRequest{}
		for _, w := range here {
			one := &pb.Reservation{Reservation: w.reservation, Spec: w.spec, Group: w.entry.group}
			for k, shard := range w.entry.shards {
				if shard == l.shard {
					one.Slices, one.Indices = append(one.Slices, w.entry.ids[k]), append(one.Indices, uint64(k))
				}
			}
			ask.Reservations = append(ask.Reservations, one)
		}
		if len(here) == 1 {
			one := ask.Reservations[0]
			ask = &pb.ReserveRequest{Reservation: one.Reservation, Spec: one.Spec, Slices: one.Slices, Indices: one.Indices, Group: one.Group}
		}
		_, err := unary(ctx, l, l.control.Reserve, func(client uint64) *pb.ReserveRequest {
			ask.Client = client
			return ask
		})
		return err
	})
}

// fill reserves the memory on the shards, sends the values, and seals them.
func (c *Client) fill(ctx context.Context, placed []*wanted) *Error {
	if err := c.reserve(ctx, placed); err != nil {
		return err
	}
	renewed, bytes := time.Now(), 0
	var frames []*frame
	send := func() *Error {
		if time.Since(renewed) > renewReservation {
			// The servers do not see the upload of the other tensors: the first two steps again keep the reservations.
			if err := c.renew(ctx, placed); err != nil {
				return err
			}
			renewed = time.Now()
		}
		err := c.assign(ctx, frames)
		frames, bytes = nil, 0
		return err
	}
	for _, w := range placed {
		for k := range w.entry.ids {
			_, count := w.entry.slice(k)
			if len(frames) == slicesInFlight || len(frames) > 0 && bytes+4*count > bytesInFlight {
				if err := send(); err != nil {
					return err
				}
			}
			frames, bytes = append(frames, w.frame(k, c.currentEpoch())), bytes+4*count
		}
	}
	if len(frames) > 0 {
		if err := send(); err != nil {
			return err
		}
	}
	return c.onShards(placed, func(l *link, here []*wanted) *Error {
		ask := &pb.SealRequest{}
		ask.Reservation, ask.Reservations = numbers(here)
		sealed, err := unary(ctx, l, l.control.Seal, func(uint64) *pb.SealRequest { return ask })
		if err == nil && sealed.Refused != nil {
			return refused(sealed.Refused, here)
		}
		return err
	})
}

// renew keeps the reservations of a long upload.
func (c *Client) renew(ctx context.Context, placed []*wanted) *Error {
	before := make([]uint64, len(placed))
	for i, w := range placed {
		before[i] = w.reservation
	}
	again, _, _, err := c.place(ctx, placed)
	if err != nil {
		return err
	}
	if len(again) != len(placed) {
		return newError(Lease, "the registration was taken over").of("", 0)
	}
	for i, w := range placed {
		if w.reservation != before[i] {
			return newError(Lease, "the registration was taken over").of(w.spec.Name, 0)
		}
	}
	return c.reserve(ctx, placed)
}

// frame assigns the initial values of a slice.
func (w *wanted) frame(k int, epoch uint64) *frame {
	first, count := w.entry.slice(k)
	header := w.entry.header(pb.Kind_KIND_ASSIGN, k, epoch)
	codec := w.entry.codec()
	header.Count, header.Codec, header.Dtype = uint64(count), codec.number(), w.spec.Dtype
	header.Reservation = w.reservation
	f := &frame{header: header, payload: codec.append(nil, w.values[first:first+count], 0, 0), answers: -1}
	f.parts = []part{{entry: w.entry, index: k, first: first, count: count}}
	return f
}

// assign sends the initial values of some slices.
func (c *Client) assign(ctx context.Context, frames []*frame) *Error {
	sent, err := c.start(true, func(uint64) ([]*frame, error) { return frames, nil })
	if err == nil {
		sent.wait(ctx)
		_, err = sent.outcome(nil)
	}
	switch err := err.(type) {
	case nil:
		return nil
	case *PartialPush:
		return err.Reason
	case *Error:
		return err
	default:
		return newError(Internal, "%s", err)
	}
}

// numbers are the reservations of a step, in the fields for one and for several.
func numbers(placed []*wanted) (uint64, []uint64) {
	if len(placed) == 1 {
		return placed[0].reservation, nil
	}
	var all []uint64
	for _, w := range placed {
		all = append(all, w.reservation)
	}
	return 0, all
}

// refused is the error of one of several reservations.
func refused(of *pb.RefusedReservation, placed []*wanted) *Error {
	err := fromRefusal(of.Refusal)
	for _, w := range placed {
		if w.reservation == of.Reservation {
			return err.of(w.spec.Name, -1)
		}
	}
	return err
}

// commit makes the tensors exist.
func (c *Client) commit(ctx context.Context, placed []*wanted) *Error {
	if len(placed) == 0 {
		return nil
	}
	ask := &pb.CommitRequest{}
	ask.Reservation, ask.Reservations = numbers(placed)
	committed, err := unary(ctx, c.links[0], c.links[0].control.Commit, func(client uint64) *pb.CommitRequest {
		ask.Client = client
		return ask
	})
	if err == nil && committed.Refused != nil {
		return refused(committed.Refused, placed)
	}
	return err
}

// drop frees the slices of registrations that are given up; what cannot be reached is freed when its lease ends.
func (c *Client) drop(placed []*wanted) {
	ctx, cancel := context.WithTimeout(context.Background(), goodbyeTime)
	defer cancel()
	for shard, l := range c.links {
		request := &pb.DropRequest{}
		for _, w := range placed {
			if shard == 0 {
				request.Slices = append(request.Slices, w.entry.ids...)
			} else {
				request.Slices = append(request.Slices, w.entry.dropOn(shard).Slices...)
			}
		}
		if len(request.Slices) > 0 {
			_, _ = l.control.Drop(l.metadata(ctx), request)
		}
	}
}
