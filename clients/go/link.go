package fastps

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	pb "fastps.example/go/fastpsv1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

const (
	connectTimeout = 5 * time.Second
	firstPause     = 10 * time.Millisecond
	longestPause   = time.Second
	// Fewer than the 64 that a slice remembers, so that each unanswered push may be sent again.
	maxUnanswered = 32
	unknown       = math.MaxUint64
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// link is the connection to one shard: a queue of frames that outlives streams, sessions and servers.
type link struct {
	client    *Client
	shard     int
	address   string
	checksums bool
	lease     time.Duration
	conn      *grpc.ClientConn
	control   pb.ControlClient
	data      pb.DataClient
	wake      chan struct{} // a frame may be sent

	mu          sync.Mutex
	incarnation uint64
	registers   bool // its calls register several tensors at a time
	marks       bool // it keeps history
	server      uint64
	cluster     uint64
	term        uint64 // the latest of an owner of the shard that answered; 0: its servers have none
	nextTag     uint64
	nextOrder   uint64
	unsent      *list.List // of *frame, in order
	sequence    uint64     // of the last push sent, and the number up to which all were answered then
	settled     uint64
	sent        map[uint64]*frame // by tag: sent on this stream and not answered
	paused      map[*frame]bool   // refused for now
	known       map[uint64]*known // slices
	toAsk       map[uint64]bool   // slices to ask a restarted server about before anything else is sent
	losses      []loss
	leaseLost   bool // the server has forgotten this incarnation: nothing more is sent under it
	closed      bool
	end         context.CancelCauseFunc // ends the present session; nil without one
	lastError   *Error
}

// known is what answers have reported about a slice.
type known struct {
	group        uint32
	epoch        uint64
	version, own uint64
	ownUnknown   bool // own was counted for another incarnation
	unanswered   int
}

type loss struct {
	slice uint64
	Loss
}

// frame is one request. Its tag belongs to one stream, its order, identity and incarnation to the frame.
type frame struct {
	header   *pb.Header
	payload  []byte
	parts    []part
	call     *call  // nil: a question of the link itself
	doubt    *Doubt // the question settles it
	answers  int    // bytes of values in the answer; -1: none
	baseOf   []uint64
	order    uint64
	tag      uint64
	client   uint64 // 0: not sent yet
	attempts int
	refused  *Error // the last refusal, if the frame is sent again
	element  *list.Element
}

// identified reports whether the frame changes its slices, once.
func (f *frame) identified() bool { return f.header.Sequence != 0 && f.doubt == nil }

func (f *frame) slices() []uint64 {
	if len(f.header.Parts) == 0 {
		return []uint64{f.header.Slice}
	}
	ids := make([]uint64, len(f.header.Parts))
	for i, part := range f.header.Parts {
		ids[i] = part.Slice
	}
	return ids
}

// complete fills in what depends on the incarnation under which the frame is sent.
func (f *frame) complete(tag, client uint64) {
	if f.client == 0 {
		f.client = client
	}
	f.header.Tag, f.header.Client = tag, f.client
	for i, of := range f.baseOf {
		if of != f.client && f.header.Table == nil {
			f.header.BaseOwn = nil
		} else if of != f.client {
			f.header.Table.BaseOwns[i] = unknown
		}
	}
}

// enqueue queues frames in order.
func (l *link) enqueue(frames []*frame) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range frames {
		if l.closed {
			f.call.deliver(f, nil, l.client.ended().of("", l.shard), nil)
		} else {
			l.push(f)
		}
	}
}

func (l *link) push(f *frame) {
	l.nextOrder++
	f.order = l.nextOrder
	f.element = l.unsent.PushBack(f)
	l.notify()
}

func (l *link) notify() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// next takes the next message to send; nil: none may be sent now.
func (l *link) next(asked map[uint64]bool) *pb.Frame {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.leaseLost {
		return nil
	}
	for slice := range l.toAsk {
		if k := l.known[slice]; !asked[slice] && k != nil {
			asked[slice] = true
			header := &pb.Header{Kind: pb.Kind_KIND_PULL_VERSION, Slice: slice, Group: k.group, Epoch: k.epoch}
			return l.take(&frame{header: header, answers: -1})
		}
	}
	front := l.unsent.Front()
	if len(l.toAsk) > 0 || front == nil {
		return nil
	}
	f := front.Value.(*frame)
	if f.identified() {
		for _, slice := range f.slices() {
			if k := l.known[slice]; k != nil && k.unanswered >= maxUnanswered {
				return nil
			}
		}
		for _, slice := range f.slices() {
			l.slice(slice).unanswered++
		}
	}
	l.unsent.Remove(front)
	f.element = nil
	return l.take(f)
}

func (l *link) take(f *frame) *pb.Frame {
	if f.identified() {
		f.header.Acknowledged = l.acknowledged(f.header.Sequence)
	}
	l.nextTag++
	f.tag = l.nextTag
	f.attempts++
	f.refused = nil
	f.complete(f.tag, l.incarnation)
	if l.checksums && len(f.payload) > 0 {
		sum := crc32.Checksum(f.payload, castagnoli)
		f.header.Crc32C = &sum
	}
	l.sent[f.tag] = f
	return &pb.Frame{Header: f.header, Payload: f.payload}
}

// acknowledged returns the number up to which all pushes are answered, when a frame of the push with this sequence is
// sent: the same for all frames of a push, since looking for it takes time.
func (l *link) acknowledged(sequence uint64) uint64 {
	if sequence == l.sequence {
		return l.settled
	}
	oldest := sequence
	for _, f := range l.openFrames() {
		if f.header.Sequence != 0 {
			oldest = min(oldest, f.header.Sequence)
		}
	}
	l.sequence, l.settled = sequence, oldest-1
	return l.settled
}

func (l *link) slice(id uint64) *known {
	if l.known[id] == nil {
		l.known[id] = &known{}
	}
	return l.known[id]
}

// drive keeps a session until the client is closed.
func (l *link) drive(ctx context.Context) {
	pause := firstPause
	for ctx.Err() == nil {
		begun := time.Now()
		err := l.session(ctx)
		l.mu.Lock()
		hadBegun := l.end != nil
		l.end, l.lastError = nil, asError(err)
		drained := l.drained()
		l.mu.Unlock()
		if hadBegun && ctx.Err() == nil {
			l.client.options.Logger.Warn("the connection has ended", "shard", l.shard, "address", l.address, "error", err)
		}
		if drained {
			continue
		}
		if time.Since(begun) > time.Second {
			pause = firstPause
		}
		wait(ctx, jitter(pause))
		// A restarted server waits one lease for its clients.
		pause = min(2*pause, longestPause, l.lease/4)
	}
	why := l.client.ended()
	if why.Kind != Closed {
		l.client.options.Logger.Error("the client has ended", "shard", l.shard, "error", why)
	}
	l.close(why)
}

func asError(err error) *Error {
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	return fromStatus(err)
}

func jitter(pause time.Duration) time.Duration {
	return time.Duration((0.5 + rand.Float64()) * float64(pause))
}

func wait(ctx context.Context, pause time.Duration) {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// session opens a stream and returns when it has ended, with the reason.
func (l *link) session(ctx context.Context) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	if err := l.open(ctx); err != nil {
		return err
	}
	stream, err := l.data.Exchange(l.metadata(ctx))
	if err != nil {
		return err
	}
	l.begin(end)
	var tasks sync.WaitGroup
	for _, task := range []func() error{
		func() error { return l.send(ctx, stream) },
		func() error { return l.receive(stream) },
		func() error { return l.heartbeat(ctx) },
	} {
		tasks.Go(func() { end(task()) })
	}
	tasks.Wait()
	return context.Cause(ctx)
}

// open renews the session, or begins one under a new incarnation if the server has forgotten the present one. It reads the
// token again.
func (l *link) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	l.client.token.refresh()
	l.mu.Lock()
	forgotten := l.drained()
	l.mu.Unlock()
	if !forgotten {
		err := l.hello(ctx, true)
		if err == nil {
			l.client.rejoin(ctx, l)
			return nil
		}
		if err.Kind != Lease && (err.Kind != Denied || err.Shard < 0) {
			return err
		}
	}
	l.client.options.Logger.Warn("the server has forgotten this client, which begins a new session", "shard", l.shard)
	l.renew()
	if err := l.hello(ctx, false); err != nil {
		return err
	}
	l.client.rejoin(ctx, l)
	return nil
}

func (l *link) hello(ctx context.Context, renew bool) *Error {
	l.mu.Lock()
	client := l.incarnation
	l.mu.Unlock()
	var report *pb.WorkerReport
	if l.shard == 0 {
		report = l.client.worker.report()
	}
	answer, err := hello(l.metadata(ctx), l.control, l.client, client, renew, report)
	if err != nil {
		if err.Kind == Fenced {
			l.client.fence(err.of("", l.shard))
		}
		return err
	}
	return l.met(answer)
}

// met handles the incarnation of the server. One that lacks the client's tensors ends the client.
func (l *link) met(answer *pb.HelloResponse) *Error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.cluster != 0 && answer.ClusterId != 0 && l.cluster != answer.ClusterId:
		err := newError(Fenced, "the server at %s is of another cluster than before: this client's tensors are not there", l.address)
		return l.client.fence(err.of("", l.shard))
	case int(answer.Shard) != l.shard || len(answer.Cluster) != len(l.client.links):
		return newError(Connection, "%s serves another shard or cluster now: connect again", l.address).expected(
			shardOf(l.shard, len(l.client.links)), shardOf(int(answer.Shard), len(answer.Cluster)))
	case answer.Term < l.term:
		return newError(Connection, "the server at %s does not own its shard any more: another one has since answered this client",
			l.address).expected(fmt.Sprintf("term %d or later", l.term), fmt.Sprintf("term %d", answer.Term))
	case l.server != answer.Server && !slices.Contains(answer.Capabilities, "log"):
		err := newError(Fenced, "the server at %s restarted without data: this client's tensors are gone; connect again "+
			"and register them (a server keeps its tensors with --data-dir)", l.address)
		return l.client.fence(err.of("", l.shard))
	}
	if answer.ClusterId != 0 {
		l.cluster = answer.ClusterId
	}
	l.term = answer.Term
	l.learn(answer)
	if l.server != answer.Server {
		l.server = answer.Server
		l.noteLosses()
		for slice, k := range l.known {
			if k.version > 0 {
				l.toAsk[slice] = true
			}
		}
		l.client.forgetMap()
	}
	return nil
}

// learn notes what the server can do.
func (l *link) learn(answer *pb.HelloResponse) {
	l.registers = slices.Contains(answer.Capabilities, registrations)
	l.marks = slices.Contains(answer.Capabilities, history)
}

// begin starts a stream, on which all unanswered frames will be sent, in order.
func (l *link) begin(end context.CancelCauseFunc) {
	l.client.options.Logger.Info("connected", "shard", l.shard, "address", l.address)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end, l.lastError = end, nil
	frames := l.openFrames()
	clear(l.sent)
	clear(l.paused)
	l.unsent.Init()
	for _, f := range frames {
		if f.call != nil || f.doubt != nil {
			f.element = l.unsent.PushBack(f)
		}
	}
	for _, k := range l.known {
		k.unanswered = 0
	}
}

// openFrames lists all unanswered frames in their order.
func (l *link) openFrames() []*frame {
	var frames []*frame
	for _, f := range l.sent {
		frames = append(frames, f)
	}
	for f := range l.paused {
		frames = append(frames, f)
	}
	for e := l.unsent.Front(); e != nil; e = e.Next() {
		frames = append(frames, e.Value.(*frame))
	}
	slices.SortFunc(frames, func(a, b *frame) int { return cmp.Compare(a.order, b.order) })
	return frames
}

func (l *link) send(ctx context.Context, stream pb.Data_ExchangeClient) error {
	asked := map[uint64]bool{}
	for {
		message := l.next(asked)
		if message == nil {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-l.wake:
			}
			continue
		}
		if stream.Send(message) != nil {
			// The receiver gets the stream's status.
			<-ctx.Done()
			return context.Cause(ctx)
		}
	}
}

func (l *link) receive(stream pb.Data_ExchangeClient) error {
	for {
		message, err := stream.Recv()
		if err != nil {
			return fromStatus(err)
		}
		if message.GetHeader() == nil {
			return newError(Frame, "the server at %s sent a frame without a header", l.address)
		}
		l.answer(message)
	}
}

// heartbeat keeps the lease, and reports the worker.
func (l *link) heartbeat(ctx context.Context) error {
	interval := l.lease / 3
	due := time.Now().Add(interval)
	for missed := 0; ; {
		pause := time.Until(due)
		if l.shard == 0 {
			pause = min(pause, reportInterval)
		}
		wait(ctx, pause)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if time.Now().Before(due) && (l.shard != 0 || !l.client.worker.hasNews()) {
			continue
		}
		due = time.Now().Add(interval)
		within, cancel := context.WithTimeout(ctx, interval)
		err := l.hello(within, true)
		late := within.Err() != nil
		cancel()
		switch {
		case err == nil:
			missed = 0
		case !late && asError(err).Kind == Capacity: // of the principal's rate: the session is as alive as before
		case !late:
			return err
		case missed == 1:
			return newError(Connection, "the server at %s does not answer", l.address)
		default:
			missed++
		}
	}
}

// metadata adds the proof that a call is this client's, and its addressee.
func (l *link) metadata(ctx context.Context) context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	pairs := []string{"fastps-secret-bin", string(l.client.secret), "fastps-shard", strconv.Itoa(l.shard)}
	if l.cluster != 0 {
		pairs = append(pairs, "fastps-cluster", strconv.FormatUint(l.cluster, 10))
	}
	return metadata.AppendToOutgoingContext(ctx, pairs...)
}

// drained reports whether the lease is lost and no sent frame is unanswered.
func (l *link) drained() bool { return l.leaseLost && len(l.sent) == 0 }

func (l *link) loseLease(client uint64) {
	if l.incarnation == client {
		l.leaseLost = true
		l.checkDrained()
	}
}

func (l *link) checkDrained() {
	if l.drained() && l.end != nil {
		l.end(newError(Lease, "the session has ended"))
	}
}

// renew takes a new incarnation: what was sent under the former one has an unknown outcome.
func (l *link) renew() {
	places := l.client.losePlaces()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.incarnation, l.leaseLost = random(), false
	for _, k := range l.known {
		k.ownUnknown = true
	}
	for _, f := range l.openFrames() {
		lost := places[f.header.Group] && f.header.Kind == pb.Kind_KIND_GRADIENT
		switch {
		case f.doubt != nil:
			l.remove(f)
			f.doubt.settle(Fate{Kind: Unknown})
		case f.call == nil:
		case f.attempts > 0 && f.identified():
			l.remove(f)
			l.giveUp(f, newError(UnknownOutcome, "sent, and not answered before the server forgot this client"))
		case lost:
			l.remove(f)
			f.call.deliver(f, nil, errPlaceLost().of("", l.shard), nil)
		default:
			f.attempts, f.client = 0, 0
		}
	}
}

// giveUp delivers the outcome of a sent push that the server cannot tell any more.
func (l *link) giveUp(f *frame, why *Error) {
	doubts := l.doubts(f)
	for _, doubt := range doubts {
		doubt.settle(Fate{Kind: Unknown})
	}
	f.call.deliver(f, nil, why.of("", l.shard), doubts)
}

// remove takes a frame out of the queue; false: it was answered.
func (l *link) remove(f *frame) bool {
	switch {
	case f.element != nil:
		l.unsent.Remove(f.element)
		f.element = nil
	case l.paused[f]:
		delete(l.paused, f)
	case l.sent[f.tag] == f:
		delete(l.sent, f.tag)
		l.answered(f)
	default:
		return false
	}
	return true
}

// answered counts a push as answered.
func (l *link) answered(f *frame) {
	if !f.identified() {
		return
	}
	for _, slice := range f.slices() {
		if k := l.known[slice]; k != nil && k.unanswered > 0 {
			k.unanswered--
		}
	}
	l.notify()
}

// abandon ends the wait for a frame because its call has ended. A push that was sent is in doubt.
func (l *link) abandon(ctx context.Context, f *frame) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.remove(f) {
		return
	}
	why := ended(ctx, l.address, cmp.Or(f.refused, l.lastError)).of("", l.shard)
	if f.attempts > 0 && f.identified() {
		why.Message = "sent, but not answered in time: whether it was applied is in doubt; " + why.Message
		f.call.deliver(f, nil, why, l.ask(f))
	} else {
		f.call.deliver(f, nil, why, nil)
	}
	l.checkDrained()
}

// close ends every wait.
func (l *link) close(why *Error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
	for _, f := range l.openFrames() {
		l.remove(f)
		switch {
		case f.doubt != nil:
			f.doubt.settle(Fate{Kind: Unknown})
		case f.call == nil:
		case f.attempts > 0 && f.identified():
			l.giveUp(f, why)
		default:
			f.call.deliver(f, nil, why.of("", l.shard), nil)
		}
	}
}
