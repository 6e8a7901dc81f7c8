package fastps

import (
	"errors"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	pb "fastps.example/go/fastpsv1"
)

const (
	reportInterval = time.Second
	// With texts of this length a report stays below the 512 bytes that servers accept.
	reportText = 96
)

// worker counts what this client's worker does. Shard 0 shows it to people.
type worker struct {
	mu          sync.Mutex
	place       Place
	advanced    map[string]uint64 // by group
	pushes      uint64
	bytes       uint64
	rejected    uint64
	stalenesses map[int64]int
	loss        *float64
	codec       Codec
	unreported  bool
	newest      *pb.WorkerReport // nil: nobody has trained with this client
	since       time.Time        // of the newest report
	waited      time.Duration    // since then
}

func newWorker() *worker {
	return &worker{advanced: map[string]uint64{}, stalenesses: map[int64]int{}, since: time.Now()}
}

// joined notes a place; the zero value: none.
func (w *worker) joined(place Place) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.place, w.unreported = place, true
}

func (w *worker) advance(group string, steps uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.advanced[group] += steps
	w.unreported = true
}

// wait counts time in which the worker waited for servers and other workers.
func (w *worker) wait(passed time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waited += passed
}

// pushed notes the outcome of a push.
func (w *worker) pushed(receipts map[string]Receipt, err error, bytes int, options PushOptions) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		var refused *Error
		if errors.As(err, &refused) && (refused.Kind == StalePush || refused.Kind == NonFinite) {
			w.rejected++
			w.unreported = true
		}
		return
	}
	w.unreported = true
	w.pushes++
	w.bytes += uint64(bytes)
	w.codec = options.Codec
	if options.Loss != nil && !math.IsNaN(*options.Loss) && !math.IsInf(*options.Loss, 0) {
		w.loss = options.Loss
	}
	staleness := int64(-1)
	for _, receipt := range receipts {
		staleness = max(staleness, receipt.Staleness)
	}
	if staleness >= 0 {
		w.stalenesses[staleness]++
	}
}

// hasNews reports whether the newest report lacks something.
func (w *worker) hasNews() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unreported
}

// report makes a report if there is news; nil: nobody has trained with this client.
func (w *worker) report() *pb.WorkerReport {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.unreported {
		return w.newest
	}
	// A worker without Advance takes a step with each push.
	steps := w.pushes
	if len(w.advanced) > 0 {
		steps = slices.Max(slices.Collect(maps.Values(w.advanced)))
	}
	host, _ := os.Hostname()
	made := &pb.WorkerReport{Rank: w.place.Rank, Host: short(host), Name: short(w.place.Name), Steps: steps,
		Loss: w.loss, Pushes: w.pushes, Bytes: w.bytes, Rejected: w.rejected, Mode: modeName(w.place.Mode),
		Codec: w.codec.name(), StalenessP50: w.percentile(.5), StalenessP99: w.percentile(.99)}
	now := time.Now()
	// The time of the first step includes the start.
	if w.newest != nil {
		passed := max(now.Sub(w.since).Seconds(), 1e-9)
		waited := min(1, w.waited.Seconds()/passed)
		made.Waited = &waited
		if steps > w.newest.Steps {
			seconds := passed / float64(steps-w.newest.Steps)
			made.StepSeconds = &seconds
		}
	}
	w.newest, w.since, w.waited, w.unreported = made, now, 0, false
	return made
}

// percentile is the smallest staleness that a share of the pushes does not exceed; nil: none is known.
func (w *worker) percentile(share float64) *uint64 {
	all := 0
	for _, pushes := range w.stalenesses {
		all += pushes
	}
	seen := 0
	for _, staleness := range slices.Sorted(maps.Keys(w.stalenesses)) {
		seen += w.stalenesses[staleness]
		if float64(seen) >= share*float64(all) {
			found := uint64(staleness)
			return &found
		}
	}
	return nil
}

func short(text string) string {
	return strings.ToValidUTF8(text[:min(len(text), reportText)], "")
}

func modeName(mode Mode) string {
	switch mode.(type) {
	case Bounded:
		return "Bounded"
	case Sync:
		return "Sync"
	}
	return "Async"
}
