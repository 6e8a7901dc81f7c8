package fastps

import (
	"context"
	"fmt"
	"math"
	"unicode/utf8"

	pb "fastps.example/go/fastpsv1"
)

// maxNoteBytes is the length of the longest note.
const maxNoteBytes = 64

// Gradient is one for a whole tensor, or for some of its rows.
type Gradient struct {
	Tensor string
	Values []float32
	// Rows of the tensor's first dimension that Values has, in sequence; nil: all. Values of a repeated row add up.
	Rows []int
}

// PushOptions are those of a push; the zero value sends float32.
type PushOptions struct {
	Codec Codec
	// Feedback holds what the codec leaves out for the next push. OneBit needs it.
	Feedback *Feedback
	// BasedOn are the versions that the gradients were computed from.
	BasedOn *Versions
	// LR replaces the optimizer's learning rate for this push; Scale is a factor on the gradients.
	LR    *float64
	Scale *float32
	// Note is what the gradients came from, such as "batch 8131", for servers that keep history: at most 64 bytes of UTF-8,
	// without control characters. Others ignore it.
	Note string
	// Loss of the step, which fastps status and metrics show.
	Loss *float64
}

// Pulled are values and their versions.
type Pulled struct {
	// Values of each tensor, in row-major order.
	Values   map[string][]float32
	Versions *Versions
}

// Push applies gradients, and returns a receipt for each tensor once all of it was applied. After a refusal of
// everything the error is an [Error]; if some slices have applied the push or owe their answer it is a [PartialPush].
func (c *Client) Push(ctx context.Context, gradients []Gradient, options PushOptions) (map[string]Receipt, error) {
	return c.push(ctx, gradients, options, nil)
}

// PushPull applies gradients for whole tensors, and returns the values that result.
func (c *Client) PushPull(ctx context.Context, gradients []Gradient, options PushOptions) (*Pulled, map[string]Receipt, error) {
	pulled := &Pulled{map[string][]float32{}, newVersions()}
	receipts, err := c.push(ctx, gradients, options, pulled)
	return pulled, receipts, err
}

func (c *Client) push(ctx context.Context, gradients []Gradient, options PushOptions, pulled *Pulled) (receipts map[string]Receipt,
	err error) {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer cancel()
	if err := options.checkNote(); err != nil {
		return nil, err
	}
	bytes := 0
	defer func() { c.worker.pushed(receipts, err, bytes, options) }()
	names := make([]string, len(gradients))
	for i, gradient := range gradients {
		names[i] = gradient.Tensor
	}
	entries, epoch, err := c.lookUp(ctx, names)
	if err != nil {
		return nil, err
	}
	for i, gradient := range gradients {
		if err := c.checkGradient(gradient, entries[i], names[:i], options, pulled != nil); err != nil {
			return nil, err
		}
	}
	if options.Feedback != nil {
		if err := options.Feedback.settled(ctx); err != nil {
			return nil, err
		}
	}
	sent, err := c.start(true, func(sequence uint64) ([]*frame, error) {
		var frames []*frame
		for i, gradient := range gradients {
			made, err := c.gradientFrames(entries[i], gradient, options, epoch, sequence, pulled != nil)
			frames = append(frames, made...)
			if err != nil {
				for _, f := range frames {
					f.parts[0].residue.refused(Fenced)
				}
				return nil, err
			}
		}
		return frames, nil
	})
	if err != nil {
		return nil, err
	}
	for _, f := range sent.frames {
		bytes += len(f.payload)
	}
	sent.wait(ctx)
	if pulled == nil {
		return sent.outcome(nil)
	}
	return sent.outcome(pulled.take)
}

func (p *Pulled) take(at part, answer sliceAnswer, values []byte) {
	name := at.entry.spec.Name
	if at.count == at.entry.n {
		p.Values[name] = at.entry.floatsOf(values)
	} else {
		if p.Values[name] == nil {
			p.Values[name] = make([]float32, at.entry.n)
		}
		at.entry.getValues(values, p.Values[name][at.first:at.first+at.count])
	}
	p.Versions.note(at, answer)
}

// checkGradient checks a gradient before any part of the push is sent.
func (c *Client) checkGradient(g Gradient, e *entry, before []string, o PushOptions, pull bool) error {
	fail := func(kind Kind, what string, expected, got any) error {
		return newError(kind, "%s", what).of(g.Tensor, -1).expected(expected, got)
	}
	n := e.n
	if g.Rows != nil {
		if len(e.spec.Shape) == 0 {
			return fail(Config, "a scalar has no rows", "Rows: nil", len(g.Rows))
		}
		n = len(g.Rows) * e.width()
	}
	for _, name := range before {
		if name == g.Tensor {
			return fail(Config, "a tensor is named twice in one push", "once", "twice")
		}
	}
	switch {
	case !e.isFloat32():
		return fail(DType, "this client pushes to float32 and bfloat16 tensors", float32s, e.spec.Dtype)
	case len(g.Values) != n:
		return fail(Shape, "the gradient does not have the length of its tensor or rows", n, len(g.Values))
	case o.Codec.number() == OneBit.id && o.Feedback == nil:
		return fail(Config, "the codec OneBit needs error feedback", "PushOptions.Feedback", "nil")
	case g.Rows != nil && (o.Feedback != nil || o.Codec.number() == OneBit.id || pull):
		return fail(Config, "a gradient of rows has no error feedback, is not OneBit, and pulls no values", "Rows: nil", "Rows")
	case c.placeIsLost(e.group):
		return errPlaceLost().of(g.Tensor, -1)
	}
	if err := checkRows(e, g.Rows); err != nil {
		return err
	}
	if err := checkFinite(g.Tensor, "the gradient", g.Values, 0); err != nil {
		return err
	}
	return nil
}

func checkFinite(tensor, what string, values []float32, first int) *Error {
	if allFinite(values) {
		return nil
	}
	for i, x := range values {
		if math.Float32bits(x)&0x7F800000 == 0x7F800000 {
			err := newError(NonFinite, "%s is not finite at index %d", what, first+i).of(tensor, -1)
			return err.expected("a finite value", x)
		}
	}
	return nil
}

// gradientFrames encodes a gradient: one frame per slice, or one for the rows in many slices of a shard.
func (c *Client) gradientFrames(e *entry, g Gradient, o PushOptions, epoch, sequence uint64, pull bool) ([]*frame, error) {
	if g.Rows != nil {
		return c.rowGradient(e, g, o, epoch, sequence)
	}
	var frames []*frame
	for k := range e.ids {
		first, count := e.slice(k)
		header := e.header(pb.Kind_KIND_GRADIENT, k, epoch)
		header.Count, header.WantValues = uint64(count), pull
		o.settings(header, e)
		f := &frame{header: header, answers: -1, parts: []part{{entry: e, index: k, first: first, count: count}}}
		if pull {
			f.answers = e.valueBytes() * count
		}
		if base, ok := o.base(e.ids[k]); ok {
			header.BaseVersion, header.BaseOwn, f.baseOf = &base.version, &base.own, []uint64{base.by}
		}
		values := g.Values[first : first+count]
		if o.Feedback == nil {
			f.payload = o.Codec.append(nil, values, uint64(first), sequence)
		} else {
			body, residue, err := o.Feedback.encode(o.Codec, values, g.Tensor, first, e.n, sequence)
			if err != nil {
				return frames, err
			}
			f.payload, f.parts[0].residue = body, residue
		}
		frames = append(frames, f)
	}
	return frames, nil
}

// settings sets the fields that all frames of a gradient share.
func (o PushOptions) settings(header *pb.Header, e *entry) {
	header.Codec, header.Dtype, header.Lr, header.Scale = o.Codec.number(), e.spec.Dtype, o.LR, o.Scale
	header.Note = o.Note
}

// checkNote fails for a note that is too long or no text; servers refuse other characters that a terminal hides.
func (o PushOptions) checkNote() error {
	if len(o.Note) > maxNoteBytes {
		return newError(Config, "the note of a push is too long").expected(
			fmt.Sprintf("at most %d bytes of UTF-8", maxNoteBytes), fmt.Sprintf("%d bytes", len(o.Note)))
	}
	if !utf8.ValidString(o.Note) {
		return newError(Config, "invalid note of a push").expected("UTF-8", "other bytes")
	}
	return nil
}

func (o PushOptions) base(slice uint64) (sliceAnswer, bool) {
	if o.BasedOn == nil {
		return sliceAnswer{}, false
	}
	base, ok := o.BasedOn.slices[slice]
	return base, ok
}

// Pull returns the values of tensors; those of bfloat16 tensors come in two bytes and are exact as float32.
func (c *Client) Pull(ctx context.Context, names ...string) (*Pulled, error) {
	pulled := &Pulled{map[string][]float32{}, newVersions()}
	if err := c.read(ctx, names, pb.Kind_KIND_PULL, pulled.take); err != nil {
		return nil, err
	}
	return pulled, nil
}

// Versions returns the versions of tensors, without their values.
func (c *Client) Versions(ctx context.Context, names ...string) (*Versions, error) {
	versions := newVersions()
	take := func(p part, answer sliceAnswer, _ []byte) { versions.note(p, answer) }
	if err := c.read(ctx, names, pb.Kind_KIND_PULL_VERSION, take); err != nil {
		return nil, err
	}
	return versions, nil
}

func (c *Client) read(ctx context.Context, names []string, kind pb.Kind, take func(part, sliceAnswer, []byte)) error {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return err
	}
	defer cancel()
	entries, epoch, err := c.lookUp(ctx, names)
	if err != nil {
		return err
	}
	asked, err := c.start(false, func(uint64) ([]*frame, error) {
		var frames []*frame
		for _, e := range entries {
			if !e.isFloat32() {
				err := newError(DType, "this client reads float32 and bfloat16 tensors").of(e.spec.Name, -1)
				return nil, err.expected(float32s, e.spec.Dtype)
			}
			for k := range e.ids {
				first, count := e.slice(k)
				f := &frame{header: e.header(kind, k, epoch), answers: -1}
				if kind == pb.Kind_KIND_PULL {
					f.answers = e.valueBytes() * count
				}
				f.parts = []part{{entry: e, index: k, first: first, count: count}}
				frames = append(frames, f)
			}
		}
		return frames, nil
	})
	if err != nil {
		return err
	}
	return asked.read(ctx, take)
}

// read waits for values; one that is refused is the error of all.
func (d *call) read(ctx context.Context, take func(part, sliceAnswer, []byte)) error {
	d.wait(ctx)
	_, err := d.outcome(take)
	if partial, ok := err.(*PartialPush); ok {
		return partial.Reason
	}
	return err
}
