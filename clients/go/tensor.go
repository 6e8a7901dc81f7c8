package fastps

import (
	"context"
	"math"
	"slices"

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

// Tensor is what is registered under a name. Values are given and returned as float32, in row-major order.
type Tensor struct {
	Name      string
	Shape     []int
	Optimizer Optimizer
	// Group of workers that the tensor belongs to. Default: "default".
	Group string
	// Hogwild allows racing pushes to overwrite each other.
	Hogwild bool
	// BFloat16 makes the servers keep the values in bfloat16: initial ones rounded to nearest, those of each step
	// stochastically.
	BFloat16 bool
}

func (t Tensor) spec() *pb.TensorSpec {
	spec := &pb.TensorSpec{Name: t.Name, Dtype: pb.DType_DTYPE_FLOAT32, Apply: pb.Apply_APPLY_EXACT, Group: t.Group,
		Optimizer: &pb.Optimizer{Name: t.Optimizer.Name, Settings: t.Optimizer.Settings, EpsMode: t.Optimizer.EpsMode}}
	if t.Hogwild {
		spec.Apply = pb.Apply_APPLY_HOGWILD
	}
	if t.BFloat16 {
		spec.Dtype = pb.DType_DTYPE_BFLOAT16
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
	if e.isFloat32() && (len(e.ids) != slices || len(e.shards) != slices) {
		return nil, newError(Frame, "the map places a tensor's slices wrongly").of(spec.GetName(), 0)
	}
	return e, nil
}

// float32s are the types of tensors whose gradients are float32.
const float32s = "DTYPE_FLOAT32 or DTYPE_BFLOAT16"

func (e *entry) isBFloat16() bool { return e.spec.GetDtype() == pb.DType_DTYPE_BFLOAT16 }

// isFloat32 reports whether gradients are float32; values may be bfloat16.
func (e *entry) isFloat32() bool {
	return e.isBFloat16() || e.spec.GetDtype() == pb.DType_DTYPE_FLOAT32
}

// codec is that of the tensor's values.
func (e *entry) codec() Codec {
	if e.isBFloat16() {
		return BFloat16
	}
	return Float32
}

// valueBytes is the size of a value on the wire.
func (e *entry) valueBytes() int { return e.codec().bodyLen(1) }

// getValues reads values as float32.
func (e *entry) getValues(body []byte, values []float32) {
	if e.isBFloat16() {
		BFloat16.decode(body, values)
		return
	}
	getFloats(body, values)
}

// floatsOf are the values of a body that nothing else uses.
func (e *entry) floatsOf(body []byte) []float32 {
	if !e.isBFloat16() {
		return floatsOf(body)
	}
	values := make([]float32, len(body)/2)
	BFloat16.decode(body, values)
	return values
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

const maxNames = 1024 // of a request, whose size is limited

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
