package fastps

import (
	"context"
	"maps"
	"slices"
	"sync"

	pb "fastps.example/go/fastpsv1"
)

// call is a push or pull under way: frames, each of which gets one result.
type call struct {
	client  *Client
	frames  []*frame
	done    chan struct{}
	mu      sync.Mutex
	results map[*frame]result
}

// result is the answer of a frame; without one, the error, and what is in doubt.
type result struct {
	message *pb.Frame
	err     *Error
	doubts  []*Doubt
}

// part is a slice's share of a frame.
type part struct {
	entry *entry
	index int // of the slice in the tensor
	// Elements of the tensor; of a message of rows, those of the gathered rows.
	first, count int
	residue      *residue
}

func (f *frame) shard() int { return f.parts[0].entry.shards[f.parts[0].index] }

// certain reports whether a refusal proves that a part was not applied.
func (f *frame) certain(refusal *Error) bool {
	return f.attempts <= 1 || !f.identified() || refusal.conclusive()
}

func (e *entry) header(kind pb.Kind, k int, epoch uint64) *pb.Header {
	return &pb.Header{Kind: kind, Slice: e.ids[k], Group: e.group, Epoch: epoch}
}

func (c *Client) currentEpoch() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.epoch
}

// start queues the frames that build makes, behind those of earlier calls. A call that changes something gets the next
// sequence number.
func (c *Client) start(identified bool, build func(sequence uint64) ([]*frame, error)) (*call, error) {
	c.sequencing.Lock()
	defer c.sequencing.Unlock()
	sequence := uint64(0)
	if identified {
		c.sequence++
		sequence = c.sequence
	}
	frames, err := build(sequence)
	if err != nil {
		return nil, err
	}
	made := &call{client: c, frames: frames, done: make(chan struct{}), results: map[*frame]result{}}
	if len(frames) == 0 {
		close(made.done)
	}
	queues := map[int][]*frame{}
	for _, f := range frames {
		f.call, f.header.Sequence = made, sequence
		queues[f.shard()] = append(queues[f.shard()], f)
	}
	for shard, queue := range queues {
		c.links[shard].enqueue(queue)
	}
	return made, nil
}

func (d *call) deliver(f *frame, message *pb.Frame, err *Error, doubts []*Doubt) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, answered := d.results[f]; answered {
		return
	}
	d.results[f] = result{message, err, doubts}
	if len(d.results) == len(d.frames) {
		close(d.done)
	}
}

// wait returns when every frame has a result, which it has when the context ends.
func (d *call) wait(ctx context.Context) {
	select {
	case <-d.done:
		return
	case <-ctx.Done():
	}
	for _, f := range d.frames {
		d.client.links[f.shard()].abandon(ctx, f)
	}
	<-d.done
}

// sliceAnswer is the part of an answer that concerns one slice.
type sliceAnswer struct {
	version, own uint64
	by           uint64 // incarnation whose changes own counts
	staleness    int64
	scale        float32
	duplicate    bool
}

// outcome hands the answered parts to take, with their values, and returns the receipts of the call or its error.
func (d *call) outcome(take func(p part, answer sliceAnswer, values []byte)) (map[string]Receipt, error) {
	receipts := map[string]Receipt{}
	partial := &PartialPush{Receipts: receipts}
	failed := map[string]bool{}
	applied := false
	for _, f := range d.frames {
		r := d.results[f]
		if r.message == nil {
			d.failed(f, r, partial, failed)
			continue
		}
		payload := r.message.Payload
		refusals := map[int]*Error{}
		for _, refused := range r.message.Header.Table.GetRefusals() {
			refusals[int(refused.Part)] = fromRefusal(refused.Refusal)
		}
		for i, p := range f.parts {
			if refusal := refusals[i]; refusal != nil {
				failed[p.entry.spec.Name] = true
				if f.certain(refusal) {
					partial.refuse(p, d.client.named(refusal, p))
				}
				continue
			}
			applied = true
			answer := f.answerOf(i, r.message.Header)
			var values []byte
			if f.answers >= 0 {
				size := p.entry.valueBytes() * p.count
				values, payload = payload[:size], payload[size:]
			}
			if take != nil {
				take(p, answer, values)
			}
			receipts[p.entry.spec.Name] = receipts[p.entry.spec.Name].with(answer)
		}
		partial.doubt(r.doubts, nil)
	}
	if partial.Reason == nil {
		return receipts, nil
	}
	if !applied && len(partial.InDoubt) == 0 {
		return nil, partial.Reason
	}
	maps.DeleteFunc(receipts, func(name string, _ Receipt) bool { return failed[name] })
	return receipts, partial
}

func (d *call) failed(f *frame, r result, partial *PartialPush, failed map[string]bool) {
	for _, p := range f.parts {
		failed[p.entry.spec.Name] = true
		if len(r.doubts) == 0 {
			partial.refuse(p, d.client.named(r.err, p))
		}
	}
	if len(r.doubts) > 0 {
		partial.doubt(r.doubts, d.client.named(r.err, f.parts[0]))
	}
}

func (p *PartialPush) refuse(at part, refusal *Error) {
	at.residue.refused(refusal.Kind)
	p.Refused = append(p.Refused, refusal)
	if p.Reason == nil {
		p.Reason = refusal
	}
}

func (p *PartialPush) doubt(doubts []*Doubt, why *Error) {
	p.InDoubt = append(p.InDoubt, doubts...)
	if p.Reason == nil && len(doubts) > 0 {
		if why == nil {
			why = newError(UnknownOutcome, "sent again, and refused: whether it was applied is in doubt").of(doubts[0].Tensor, doubts[0].Shard)
		}
		p.Reason = why
	}
}

// named names the tensor of a refusal; after one that asks for the current map, the next call fetches that.
func (c *Client) named(refusal *Error, p part) *Error {
	if refusal.Kind == UnknownTensor || refusal.Kind == StaleEpoch {
		c.forgetMap()
	}
	return refusal.of(p.entry.spec.Name, p.entry.shards[p.index])
}

func (f *frame) answerOf(i int, h *pb.Header) sliceAnswer {
	answer := sliceAnswer{version: h.GetVersion(), own: h.GetOwn(), by: f.client, staleness: -1, scale: 1, duplicate: h.Duplicate}
	if h.Scale != nil {
		answer.scale = *h.Scale
	}
	if len(f.header.Parts) == 0 {
		if h.Staleness != nil {
			answer.staleness = int64(*h.Staleness)
		}
		return answer
	}
	answer.version, answer.own = h.Table.Versions[i], h.Table.Owns[i]
	if len(h.Table.Stalenesses) > 0 && h.Table.Stalenesses[i] != unknown {
		answer.staleness = int64(h.Table.Stalenesses[i])
	}
	answer.duplicate = slices.Contains(h.Table.Duplicates, uint32(i))
	return answer
}

// Receipt says that every slice of a tensor has applied a push.
type Receipt struct {
	// Version is the smallest version of the slices.
	Version uint64
	// Staleness is the largest number of changes by others since the base; -1: the base is unknown.
	Staleness int64
	// Scale is the smallest factor that took effect.
	Scale float32
	// Duplicate is set if all slices had applied the push before.
	Duplicate bool

	slices int
}

func (r Receipt) with(answer sliceAnswer) Receipt {
	if r.slices == 0 {
		return Receipt{answer.version, answer.staleness, answer.scale, answer.duplicate, 1}
	}
	return Receipt{min(r.Version, answer.version), max(r.Staleness, answer.staleness), min(r.Scale, answer.scale),
		r.Duplicate && answer.duplicate, r.slices + 1}
}

// Versions are those of the slices that a pull has seen; a push may be based on them.
type Versions struct {
	slices  map[uint64]sliceAnswer
	tensors map[string][]uint64
}

func newVersions() *Versions { return &Versions{map[uint64]sliceAnswer{}, map[string][]uint64{}} }

func (v *Versions) note(p part, answer sliceAnswer) {
	id := p.entry.ids[p.index]
	v.slices[id] = answer
	v.tensors[p.entry.spec.Name] = append(v.tensors[p.entry.spec.Name], id)
}

// Of returns the versions of a tensor's slices, in their order.
func (v *Versions) Of(tensor string) []uint64 {
	var versions []uint64
	for _, id := range v.tensors[tensor] {
		versions = append(versions, v.slices[id].version)
	}
	return versions
}
