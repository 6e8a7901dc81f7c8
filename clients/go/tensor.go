package fastps

import (
	"context"
	"math"
	"slices"
	"time"

	pb "fastps.example/go/fastpsv1"
)

// sliceLen is the number of float32 elements of a slice.
const sliceLen = 63 * 4096

// Optimizer applies gradients. Name and settings are torch's; section 4 of protos/README.md lists them.
type Optimizer struct {
	Name     string
	Settings map[string]float64
	// EpsMode is "outside" (default), "inside" or "both".
	EpsMode string
}

// Tensor is what is registered under a name. Values are float32, in row-major order.
type Tensor struct {
	Name      string
	Shape     []int
	Optimizer Optimizer
	// Group of workers that the tensor belongs to. Default: "default".
	Group string
	// Hogwild allows racing pushes to overwrite each other.
	Hogwild bool
}

func (t Tensor) spec() *pb.TensorSpec {
	spec := &pb.TensorSpec{Name: t.Name, Dtype: pb.DType_DTYPE_FLOAT32, Apply: pb.Apply_APPLY_EXACT, Group: t.Group,
		Optimizer: &pb.Optimizer{Name: t.Optimizer.Name, Settings: t.Optimizer.Settings, EpsMode: t.Optimizer.EpsMode}}
	if t.Hogwild {
		spec.Apply = pb.Apply_APPLY_HOGWILD
	}
	if spec.Group == "" {
		spec.Group = "default"
	}
	for _, n := range t.Shape {
		spec.Shape = append(spec.Shape, uint64(n))
	}
	return spec
}

// entry is a tensor of the map.
type entry struct {
	spec   *pb.TensorSpec
	group  uint32
	ids    []uint64 // slices
	shards []int    // of each
	n      int      // elements
	stale  bool     // the map must be asked before it is used again
}

func newEntry(spec *pb.TensorSpec, placement *pb.Placement, shards int) (*entry, *Error) {
	e := &entry{spec: spec, group: placement.GetGroup(), ids: placement.GetSlices(), n: 1}
	for _, dim := range spec.GetShape() {
		if dim > 0 && uint64(e.n) > math.MaxInt64/dim {
			return nil, newError(Frame, "the map has a tensor that is too large").of(spec.GetName(), 0)
		}
		e.n *= int(dim)
	}
	slices := max(1, ceil(e.n, sliceLen))
	for _, shard := range placement.GetShards() {
		e.shards = append(e.shards, int(shard))
		if int(shard) >= shards {
			slices = -1
		}
	}
	if spec.GetDtype() == pb.DType_DTYPE_FLOAT32 && (len(e.ids) != slices || len(e.shards) != slices) {
		return nil, newError(Frame, "the map places a tensor's slices wrongly").of(spec.GetName(), 0)
	}
	return e, nil
}

// slice returns the elements of slice k.
func (e *entry) slice(k int) (first, count int) {
	return k * sliceLen, min(sliceLen, e.n-k*sliceLen)
}

func (e *entry) width() int {
	width := 1
	for _, n := range e.spec.Shape[min(1, len(e.spec.Shape)):] {
		width *= int(n)
	}
	return width
}

// lookUp finds tensors in the map, of which it asks shard 0 for those that it does not know.
func (c *Client) lookUp(ctx context.Context, names []string) ([]*entry, uint64, error) {
	for asked := false; ; asked = true {
		found := make([]*entry, len(names))
		var missing []string
		c.mu.Lock()
		for i, name := range names {
			if found[i] = c.tensors[name]; found[i] == nil || found[i].stale {
				missing = append(missing, name)
			}
		}
		epoch := c.epoch
		c.mu.Unlock()
		if len(missing) == 0 {
			return found, epoch, nil
		}
		if asked {
			return nil, 0, newError(UnknownTensor, "no tensor of this name is registered").of(missing[0], 0)
		}
		// Servers refuse more than 4096 names in one call.
		for names := range slices.Chunk(missing, 1000) {
			if err := c.fetch(ctx, names); err != nil {
				return nil, 0, err
			}
		}
	}
}

// fetch keeps these tensors of the map; without names, all.
func (c *Client) fetch(ctx context.Context, names []string) error {
	for {
		asked := names[:min(len(names), maxNames)]
		err := c.listed(ctx, asked, func(listed *pb.MapEntry) *Error {
			e, err := newEntry(listed.Spec, listed.Placement, len(c.links))
			if err == nil {
				c.keep(e)
			}
			return err
		})
		if names = names[len(asked):]; err != nil || len(names) == 0 {
			return err
		}
	}
}

// listed hands tensors of the map to take, in the order of their names; without names, all.
func (c *Client) listed(ctx context.Context, names []string, take func(*pb.MapEntry) *Error) error {
	after := ""
	for {
		page, refusal := unary(ctx, c.links[0], c.links[0].control.GetMap, func(uint64) *pb.GetMapRequest {
			return &pb.GetMapRequest{Names: names, After: after}
		})
		if refusal != nil {
			return refusal
		}
		for _, listed := range page.Entries {
			if err := take(listed); err != nil {
				return err
			}
		}
		c.mu.Lock()
		c.epoch = page.Epoch
		c.mu.Unlock()
		if page.Next == "" || page.Next <= after {
			return nil
		}
		after = page.Next
	}
}

func (c *Client) keep(e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tensors[e.spec.GetName()] = e
}

// forgetMap makes the next call ask for the map.
func (c *Client) forgetMap() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.tensors {
		e.stale = true
	}
}

const (
	maxNames         = 1024 // of a request, whose size is limited
	renewReservation = 5 * time.Second
	slicesInFlight   = 16
)

// Register creates a tensor with these values, unless it exists with the same specification; it reports whether it
// created it. A tensor of another specification is a Precondition error.
func (c *Client) Register(ctx context.Context, tensor Tensor, values []float32) (bool, error) {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return false, err
	}
	defer cancel()
	spec, n := tensor.spec(), 1
	for _, dim := range tensor.Shape {
		if dim < 0 {
			return false, newError(Shape, "a dimension is negative").of(tensor.Name, -1).expected("0 or more", dim)
		}
		n *= dim
	}
	if n != len(values) {
		err := newError(Shape, "the values do not fill the shape").of(tensor.Name, -1)
		return false, err.expected(n, len(values))
	}
	if err := checkFinite(tensor.Name, "the value", values, 0); err != nil {
		return false, err
	}
	e, reservation, refusal := c.place(ctx, spec)
	if refusal != nil {
		return false, refusal.of(tensor.Name, -1)
	}
	if reservation == 0 {
		c.keep(e)
		return false, nil
	}
	if err := c.fill(ctx, e, reservation, values); err != nil {
		c.drop(e)
		return false, err
	}
	_, refusal = unary(ctx, c.links[0], c.links[0].control.Commit, func(client uint64) *pb.CommitRequest {
		return &pb.CommitRequest{Reservation: reservation, Client: client}
	})
	if refusal != nil {
		// A lost answer may have been a success.
		if again, _, err := c.place(ctx, spec); err != nil || !slices.Equal(again.ids, e.ids) {
			return false, refusal.of(tensor.Name, -1)
		}
	}
	c.keep(e)
	return true, nil
}

// place asks shard 0 for a place, and waits while another client registers the tensor. Without a reservation it exists.
func (c *Client) place(ctx context.Context, spec *pb.TensorSpec) (*entry, uint64, *Error) {
	for {
		answer, err := unary(ctx, c.links[0], c.links[0].control.Register, func(client uint64) *pb.RegisterRequest {
			return &pb.RegisterRequest{Spec: spec, Client: client}
		})
		switch {
		case err != nil && err.Kind == Lease && ctx.Err() == nil:
			wait(ctx, 10*firstPause) // for the new session
		case err != nil:
			return nil, 0, err
		case answer.UnderWay:
			wait(ctx, time.Duration(max(answer.RetryAfterMs, 1))*time.Millisecond)
		default:
			e, err := newEntry(spec, answer.Placement, len(c.links))
			if err == nil && !answer.Exists && answer.Reservation == 0 {
				err = newError(Frame, "the server gave no reservation").of(spec.Name, 0)
			}
			return e, answer.Reservation, err
		}
		if ctx.Err() != nil {
			return nil, 0, ended(ctx, c.links[0].address, err)
		}
	}
}

// fill reserves the memory on the shards, sends the values, and seals them.
func (c *Client) fill(ctx context.Context, e *entry, reservation uint64, values []float32) error {
	mine := map[int]*pb.ReserveRequest{}
	for k, shard := range e.shards {
		if mine[shard] == nil {
			mine[shard] = &pb.ReserveRequest{Reservation: reservation, Spec: e.spec, Group: e.group}
		}
		mine[shard].Slices = append(mine[shard].Slices, e.ids[k])
		mine[shard].Indices = append(mine[shard].Indices, uint64(k))
	}
	for shard, request := range mine {
		_, err := unary(ctx, c.links[shard], c.links[shard].control.Reserve, func(client uint64) *pb.ReserveRequest {
			request.Client = client
			return request
		})
		if err != nil {
			return err.of(e.spec.Name, shard)
		}
	}
	renewed := time.Now()
	for from := 0; from < len(e.ids); from += slicesInFlight {
		if time.Since(renewed) > renewReservation {
			// Shard 0 does not see the upload: the first step again keeps the reservation.
			if _, same, err := c.place(ctx, e.spec); err != nil || same != reservation {
				return newError(Lease, "the registration was taken over").of(e.spec.Name, 0)
			}
			renewed = time.Now()
		}
		if err := c.assign(ctx, e, reservation, values, from, min(from+slicesInFlight, len(e.ids))); err != nil {
			return err
		}
	}
	for shard := range mine {
		_, err := unary(ctx, c.links[shard], c.links[shard].control.Seal, func(uint64) *pb.SealRequest {
			return &pb.SealRequest{Reservation: reservation}
		})
		if err != nil {
			return err.of(e.spec.Name, shard)
		}
	}
	return nil
}

// assign sends the initial values of some slices.
func (c *Client) assign(ctx context.Context, e *entry, reservation uint64, values []float32, from, to int) error {
	sent, err := c.start(true, func(uint64) ([]*frame, error) {
		var frames []*frame
		for k := from; k < to; k++ {
			first, count := e.slice(k)
			header := e.header(pb.Kind_KIND_ASSIGN, k, c.currentEpoch())
			header.Count, header.Codec, header.Dtype = uint64(count), Float32.number(), e.spec.Dtype
			header.Reservation = reservation
			f := &frame{header: header, payload: Float32.append(nil, values[first:first+count], 0, 0), answers: -1}
			f.parts = []part{{entry: e, index: k, first: first, count: count}}
			frames = append(frames, f)
		}
		return frames, nil
	})
	if err != nil {
		return err
	}
	sent.wait(ctx)
	_, err = sent.outcome(nil)
	return err
}

// drop frees the slices of a registration that is given up; what cannot be reached is freed when its lease ends.
func (c *Client) drop(e *entry) {
	ctx, cancel := context.WithTimeout(context.Background(), goodbyeTime)
	defer cancel()
	for shard, l := range c.links {
		request := e.dropOn(shard)
		if shard == 0 {
			request.Slices = e.ids
		}
		if len(request.Slices) > 0 {
			_, _ = l.control.Drop(l.metadata(ctx), request)
		}
	}
}

// Names lists all tensors, sorted.
func (c *Client) Names(ctx context.Context) ([]string, error) {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	var names []string
	err = c.listed(ctx, nil, func(listed *pb.MapEntry) *Error {
		names = append(names, listed.Spec.GetName())
		return nil
	})
	return names, err
}

// Unregister removes a tensor. If its name is not registered the error is UnknownTensor.
func (c *Client) Unregister(ctx context.Context, name string) error {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	found, _, err := c.lookUp(ctx, []string{name})
	if err != nil {
		return err
	}
	removed := found[0]
	answer, refusal := unary(ctx, c.links[0], c.links[0].control.Unregister, func(uint64) *pb.UnregisterRequest {
		return &pb.UnregisterRequest{Name: name}
	})
	// It may be gone by an attempt of this call whose answer was lost, and its slices still there.
	if refusal != nil && refusal.Kind != UnknownTensor {
		return refusal.of(name, 0)
	}
	if refusal == nil {
		placed, err := newEntry(removed.spec, answer.Placement, len(c.links))
		if err != nil {
			return err
		}
		removed = placed
	}
	for shard, l := range c.links {
		if request := removed.dropOn(shard); len(request.Slices) > 0 {
			_, err := unary(ctx, l, l.control.Drop, func(uint64) *pb.DropRequest { return request })
			if err != nil {
				return err.of(name, shard)
			}
		}
	}
	// Kept until now, so that a failed call may be repeated.
	c.mu.Lock()
	delete(c.tensors, name)
	c.mu.Unlock()
	if refusal != nil {
		return refusal.of(name, 0)
	}
	return nil
}

// dropOn names the slices on a shard.
func (e *entry) dropOn(shard int) *pb.DropRequest {
	request := &pb.DropRequest{}
	for k, at := range e.shards {
		if at == shard {
			request.Slices = append(request.Slices, e.ids[k])
		}
	}
	return request
}

// Stats asks each shard for its counters (docs/reference/servers.md), sessions and groups.
func (c *Client) Stats(ctx context.Context) ([]*pb.StatsResponse, error) {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	stats := make([]*pb.StatsResponse, len(c.links))
	for shard, l := range c.links {
		answer, err := unary(ctx, l, l.control.Stats, func(uint64) *pb.StatsRequest { return &pb.StatsRequest{} })
		if err != nil {
			return nil, err
		}
		stats[shard] = answer
	}
	return stats, nil
}
