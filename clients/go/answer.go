package fastps

import (
	"context"
	"sync"
	"time"

	pb "fastps.example/go/fastpsv1"
)

// FateKind is the outcome of a slice's push that was in doubt.
type FateKind int

// The fates.
const (
	// Unknown: the server no longer knows.
	Unknown FateKind = iota
	// Applied: it was applied.
	Applied
	// NotApplied: it was not applied, and never will be; its content has returned to the error feedback.
	NotApplied
)

// Fate is an outcome, with the version at which a push was applied.
type Fate struct {
	Kind    FateKind
	Version uint64
}

// Doubt is a slice of a push that was sent and not answered in time. The client asks the server for its outcome.
type Doubt struct {
	Tensor string
	Shard  int
	// First and Count are the elements of the tensor that the slice holds.
	First, Count int

	residue *residue
	once    sync.Once
	fate    Fate
	done    chan struct{}
}

// Wait returns the fate as soon as it is known.
func (d *Doubt) Wait(ctx context.Context) (Fate, error) {
	select {
	case <-d.done:
		return d.fate, nil
	case <-ctx.Done():
		err := ended(ctx, "the server", nil)
		err.Message = "a push is still in doubt: " + err.Message
		return Fate{}, err.of(d.Tensor, d.Shard)
	}
}

func (d *Doubt) settle(fate Fate) {
	d.once.Do(func() {
		if fate.Kind == NotApplied {
			d.residue.refused(Fenced)
		}
		d.fate = fate
		close(d.done)
	})
}

// doubts makes the doubts of a frame, one per slice.
func (l *link) doubts(f *frame) []*Doubt {
	made := make([]*Doubt, len(f.parts))
	for i, p := range f.parts {
		made[i] = &Doubt{Tensor: p.entry.spec.Name, Shard: l.shard, First: p.first, Count: p.count,
			residue: p.residue, done: make(chan struct{})}
		if p.residue != nil {
			feedback := p.residue.feedback
			feedback.mu.Lock()
			feedback.doubts = append(feedback.doubts, made[i])
			feedback.mu.Unlock()
		}
	}
	return made
}

// ask leaves a doubt about each slice of a frame, and queues the questions that will settle them.
func (l *link) ask(f *frame) []*Doubt {
	doubts := l.doubts(f)
	for i, slice := range f.slices() {
		l.question(f, doubts[i], slice)
	}
	return doubts
}

func (l *link) question(f *frame, doubt *Doubt, slice uint64) {
	header := &pb.Header{Kind: pb.Kind_KIND_RESOLVE, Slice: slice, Group: f.header.Group, Epoch: f.header.Epoch,
		Sequence: f.header.Sequence}
	l.push(&frame{header: header, doubt: doubt, client: f.client, answers: -1})
}

// answer delivers an answer. One that no request waits for is ignored.
func (l *link) answer(message *pb.Frame) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f := l.sent[message.Header.Tag]
	if f == nil {
		return
	}
	delete(l.sent, f.tag)
	l.answered(f)
	var refusal *Error
	if message.Header.Kind == pb.Kind_KIND_REFUSED {
		refusal = fromRefusal(message.Header.Refusal)
	}
	switch {
	case f.doubt != nil:
		l.answerDoubt(f, message, refusal)
	case f.call == nil:
		l.answerQuestion(f, message, refusal)
	case refusal != nil:
		l.answerRefusal(f, refusal)
	case !f.fits(message):
		why := newError(Frame, "the answer of %s does not fit its request", l.address).of("", l.shard)
		if f.identified() {
			f.call.deliver(f, nil, why, l.ask(f))
		} else {
			f.call.deliver(f, nil, why, nil)
		}
	default:
		l.note(f, message.Header)
		f.call.deliver(f, message, nil, nil)
	}
	l.checkDrained()
}

// answerDoubt settles a doubt, or asks again later.
func (l *link) answerDoubt(f *frame, message *pb.Frame, refusal *Error) {
	h := message.Header
	switch {
	case refusal != nil && (refusal.Kind == Unavailable || refusal.Kind == Capacity):
		l.later(f, refusal)
	case h.Kind == pb.Kind_KIND_RECEIPT || h.Kind == pb.Kind_KIND_VALUES:
		l.noteSlice(f.header.Slice, f.header, h.GetVersion(), h.GetOwn())
		f.doubt.settle(Fate{Applied, h.GetVersion()})
	case h.Kind == pb.Kind_KIND_FENCED:
		f.doubt.settle(Fate{Kind: NotApplied})
	default:
		f.doubt.settle(Fate{Kind: Unknown})
	}
}

// later sends a frame again after a pause, or on the next stream.
func (l *link) later(f *frame, refusal *Error) {
	f.refused = refusal
	l.paused[f] = true
	time.AfterFunc(max(refusal.RetryAfter, firstPause), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.paused[f] {
			delete(l.paused, f)
			f.element = l.unsent.PushBack(f)
			l.notify()
		}
	})
}

// answerRefusal handles the refusal of a whole frame.
func (l *link) answerRefusal(f *frame, refusal *Error) {
	// The refusal of a repeat may not cover earlier attempts.
	certain := f.attempts == 1 || !f.identified()
	switch {
	case refusal.Kind == Unavailable && refusal.RetryAfter >= 0:
		if certain {
			f.attempts, f.client = 0, 0
		}
		l.later(f, refusal)
	case refusal.Kind == Lease && f.header.Reservation == 0:
		l.loseLease(f.client)
		switch {
		case !certain:
			l.giveUp(f, refusal)
		case f.header.Kind == pb.Kind_KIND_GRADIENT && l.client.hasPlaces():
			// The others have continued without this worker: its gradient is of values that are gone.
			f.call.deliver(f, nil, refusal, nil)
		default:
			f.attempts, f.client = 0, 0
			f.element = l.unsent.PushFront(f)
		}
	case certain || refusal.conclusive():
		f.call.deliver(f, nil, refusal, nil)
	default:
		f.call.deliver(f, nil, refusal, l.ask(f))
	}
}

// fits reports whether an answer is one that the request can have.
func (f *frame) fits(message *pb.Frame) bool {
	h := message.Header
	if n := len(f.header.Parts); n > 0 {
		if len(h.Table.GetVersions()) != n || len(h.Table.GetOwns()) != n {
			return false
		}
		if m := len(h.Table.Stalenesses); m != 0 && m != n {
			return false
		}
		for _, refused := range h.Table.Refusals {
			if int(refused.Part) >= n {
				return false
			}
		}
	}
	switch {
	case h.Lent != nil:
		return false
	case h.Kind == pb.Kind_KIND_VERSION:
		return f.header.Kind == pb.Kind_KIND_PULL_VERSION
	case h.Kind == pb.Kind_KIND_RECEIPT:
		return f.identified() && f.answers < 0
	case h.Kind == pb.Kind_KIND_VALUES:
		return f.answers >= 0 && len(message.Payload) == f.answers-f.refusedBytes(h)
	}
	return false
}

// refusedBytes is the size of the values that an answer lacks, because their parts were refused.
func (f *frame) refusedBytes(h *pb.Header) (n int) {
	for _, refused := range h.Table.GetRefusals() {
		part := f.parts[refused.Part]
		n += part.entry.valueBytes() * part.count
	}
	return n
}

// note keeps what an answer reports about slices, except for pulls by a client that wants its pushes in the log:
// they may show changes that are not.
func (l *link) note(f *frame, h *pb.Header) {
	if !f.identified() && (l.client.options.Logged || l.client.options.Copied) {
		return
	}
	if len(f.header.Parts) == 0 {
		l.noteSlice(f.header.Slice, f.header, h.GetVersion(), h.GetOwn())
		return
	}
	refused := map[int]bool{}
	for _, part := range h.Table.Refusals {
		refused[int(part.Part)] = true
	}
	for i, part := range f.header.Parts {
		if !refused[i] {
			l.noteSlice(part.Slice, f.header, h.Table.Versions[i], h.Table.Owns[i])
		}
	}
}

func (l *link) noteSlice(id uint64, h *pb.Header, version, own uint64) {
	k := l.slice(id)
	k.group, k.epoch = h.Group, h.Epoch
	k.version = max(k.version, version)
	if k.ownUnknown {
		k.own, k.ownUnknown = 0, false
	}
	k.own = max(k.own, own)
}

// answerQuestion handles a restarted server's answer about the state of a slice.
func (l *link) answerQuestion(f *frame, message *pb.Frame, refusal *Error) {
	id := f.header.Slice
	h := message.Header
	switch {
	case refusal != nil && refusal.Kind == Lease:
		l.loseLease(f.client)
	case refusal != nil && refusal.Kind == Unavailable:
		// It is about to stop: the next stream asks again.
	case h.Kind == pb.Kind_KIND_VERSION:
		if k := l.known[id]; k != nil && l.toAsk[id] {
			l.left(id, k, h.GetVersion(), h.GetOwn())
		}
		delete(l.toAsk, id)
	default:
		// The slice is gone, which every other call will report.
		delete(l.known, id)
		delete(l.toAsk, id)
	}
	if len(l.toAsk) == 0 {
		l.noteLosses()
		l.notify()
	}
}

// left compares a slice with what its former server had acknowledged.
func (l *link) left(id uint64, k *known, version, own uint64) {
	gone := int64(-1)
	if !k.ownUnknown {
		gone = int64(k.own - min(k.own, own))
	}
	if gone > 0 || version < k.version {
		l.losses = append(l.losses, loss{id, Loss{Shard: l.shard, Own: gone, Seen: k.version, Now: version}})
	}
	if k.ownUnknown {
		k.own, k.ownUnknown = own, false
	}
	k.version, k.own = min(k.version, version), min(k.own, own)
}

func (l *link) noteLosses() {
	l.client.noteLosses(l.losses)
	l.losses = nil
}
