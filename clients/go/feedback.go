package fastps

import (
	"context"
	"maps"
	"slices"
	"sync"
)

// Feedback is what lossy codecs have left out, per tensor; each push adds it to its gradient. It belongs to one
// worker, whose pushes with it come one at a time, and is safe for concurrent use.
type Feedback struct {
	mu        sync.Mutex
	residuals map[string][]float32
	doubts    []*Doubt
}

// NewFeedback returns error feedback that continues from saved residuals; nil: from zero.
func NewFeedback(residuals map[string][]float32) *Feedback {
	f := &Feedback{residuals: map[string][]float32{}}
	for tensor, residual := range residuals {
		f.residuals[tensor] = slices.Clone(residual)
	}
	return f
}

// Residuals returns a copy to save, as soon as no push with this feedback is in doubt.
func (f *Feedback) Residuals(ctx context.Context) (map[string][]float32, error) {
	if err := f.settled(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	saved := maps.Clone(f.residuals)
	for tensor, residual := range saved {
		saved[tensor] = slices.Clone(residual)
	}
	return saved, nil
}

// settled waits until no push is in doubt, whose content may still return.
func (f *Feedback) settled(ctx context.Context) error {
	f.mu.Lock()
	doubts := f.doubts
	f.doubts = nil
	f.mu.Unlock()
	for i, doubt := range doubts {
		if _, err := doubt.Wait(ctx); err != nil {
			f.mu.Lock()
			f.doubts = append(f.doubts, doubts[i:]...)
			f.mu.Unlock()
			return err
		}
	}
	return nil
}

func (f *Feedback) residual(tensor string, n int) []float32 {
	residual, ok := f.residuals[tensor]
	if !ok || len(residual) != n {
		residual = make([]float32, n)
		f.residuals[tensor] = residual
	}
	return residual
}

// encode encodes values plus residual, of which the new residual is what the body leaves out.
func (f *Feedback) encode(codec Codec, values []float32, tensor string, first, total int, sequence uint64) ([]byte, *residue, *Error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	residual := f.residual(tensor, total)[first : first+len(values)]
	sum := make([]float32, len(values))
	for i, x := range values {
		sum[i] = x + residual[i]
	}
	if err := checkFinite(tensor, "the gradient with its residual", sum, first); err != nil {
		return nil, nil, err
	}
	body := codec.append(nil, sum, uint64(first), sequence)
	decoded := make([]float32, len(values))
	codec.decode(body, decoded)
	for i := range residual {
		residual[i] = sum[i] - decoded[i]
	}
	return body, &residue{f, codec, tensor, first, len(values), total, body}, nil
}

// residue is the content of one body, which returns to its residual if it is never applied.
type residue struct {
	feedback        *Feedback
	codec           Codec
	tensor          string
	first, n, total int
	body            []byte
}

// refused handles a refusal. A gradient that came late, or whose step overflows, would be refused again.
func (r *residue) refused(kind Kind) {
	if r == nil || kind == StalePush || kind == Lease {
		return
	}
	r.feedback.mu.Lock()
	defer r.feedback.mu.Unlock()
	residual := r.feedback.residual(r.tensor, r.total)[r.first : r.first+r.n]
	if kind == NonFinite {
		clear(residual)
		return
	}
	decoded := make([]float32, r.n)
	r.codec.decode(r.body, decoded)
	for i := range residual {
		residual[i] += decoded[i]
	}
}
