package fastps

import (
	"context"
	"encoding/binary"
	"slices"

	pb "fastps.example/go/fastpsv1"
)

const (
	// A message of rows stays below 1 MiB, unless one slice's rows need more.
	rowMessageBytes = 1<<20 - 4096
	maxParts        = 4096
)

func checkRows(e *entry, rows []int) error {
	for _, row := range rows {
		if row < 0 || row >= int(e.spec.Shape[0]) {
			err := newError(Shape, "a row is outside the tensor").of(e.spec.Name, -1)
			return err.expected([2]int{0, int(e.spec.Shape[0]) - 1}, row)
		}
	}
	return nil
}

// rowPart are the rows of one slice: their numbers there, and their elements among the gathered rows.
type rowPart struct {
	part
	numbers []byte
}

// planRows sorts rows, drops repeats, and splits them by slice; every: also slices without rows.
func planRows(e *entry, rows []int, every bool) (distinct []int, parts []*rowPart) {
	distinct = slices.Compact(slices.Sorted(slices.Values(rows)))
	width := e.width()
	of := map[int]*rowPart{}
	at := 0
	for _, row := range distinct {
		for from := row * width; from < (row+1)*width; {
			k := from / sliceLen
			to := min((row+1)*width, (k+1)*sliceLen)
			if of[k] == nil {
				of[k] = &rowPart{part: part{entry: e, index: k, first: at}}
			}
			of[k].numbers = binary.LittleEndian.AppendUint32(of[k].numbers, uint32(row-k*sliceLen/width))
			of[k].count += to - from
			at += to - from
			from = to
		}
	}
	for k := range e.ids {
		if of[k] == nil && every {
			of[k] = &rowPart{part: part{entry: e, index: k, first: at}}
		}
		if of[k] != nil {
			parts = append(parts, of[k])
		}
	}
	return distinct, parts
}

// rowFrames distributes parts over messages, each for one shard.
func rowFrames(e *entry, parts []*rowPart, header func() *pb.Header, add func(f *frame, p *rowPart)) []*frame {
	var frames []*frame
	open := map[int]*frame{}
	bytes := map[int]int{}
	for _, p := range parts {
		shard, size := e.shards[p.index], 64+len(p.numbers)+4*p.count
		f := open[shard]
		if f == nil || bytes[shard]+size > rowMessageBytes || len(f.parts) == maxParts {
			f = &frame{header: header(), answers: -1}
			open[shard], bytes[shard] = f, 0
			frames = append(frames, f)
		}
		bytes[shard] += size
		wire := &pb.Part{Slice: e.ids[p.index], Count: uint64(len(p.numbers) / 4)}
		f.header.Parts = append(f.header.Parts, wire)
		f.parts = append(f.parts, p.part)
		f.payload = append(f.payload, p.numbers...)
		add(f, p)
	}
	return frames
}

// rowGradient encodes the gradient of some rows.
func (c *Client) rowGradient(e *entry, g Gradient, o PushOptions, epoch, sequence uint64) ([]*frame, error) {
	distinct, parts := planRows(e, g.Rows, c.isSync(e.group))
	width := e.width()
	gathered := make([]float32, len(distinct)*width)
	for i, row := range g.Rows {
		at, _ := slices.BinarySearch(distinct, row)
		for j, x := range g.Values[i*width : (i+1)*width] {
			gathered[at*width+j] += x
		}
	}
	if err := checkFinite(g.Tensor, "the sum of a repeated row", gathered, 0); err != nil {
		return nil, err
	}
	header := func() *pb.Header {
		header := &pb.Header{Kind: pb.Kind_KIND_GRADIENT, Group: e.group, Epoch: epoch}
		o.settings(header, e)
		if o.BasedOn != nil {
			header.Table = &pb.PartTable{}
		}
		return header
	}
	return rowFrames(e, parts, header, func(f *frame, p *rowPart) {
		f.header.Parts[len(f.parts)-1].Elements = uint32(p.count)
		f.payload = o.Codec.append(f.payload, gathered[p.first:p.first+p.count], uint64(p.index*sliceLen), sequence)
		if table := f.header.Table; table != nil {
			base, ok := o.base(e.ids[p.index])
			if !ok {
				base = sliceAnswer{version: unknown, own: unknown}
			}
			table.BaseVersions = append(table.BaseVersions, base.version)
			table.BaseOwns = append(table.BaseOwns, base.own)
			f.baseOf = append(f.baseOf, base.by)
		}
	}), nil
}

// PullRows returns rows of a tensor's first dimension, in sequence in the order asked for.
func (c *Client) PullRows(ctx context.Context, name string, rows []int) ([]float32, *Versions, error) {
	ctx, cancel, err := c.begin(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer cancel()
	entries, epoch, err := c.lookUp(ctx, []string{name})
	if err != nil {
		return nil, nil, err
	}
	e := entries[0]
	if !e.isFloat32() || len(e.spec.Shape) == 0 {
		return nil, nil, newError(DType, "rows are those of float32 and bfloat16 tensors with a shape").of(name, -1)
	}
	if err := checkRows(e, rows); err != nil {
		return nil, nil, err
	}
	distinct, parts := planRows(e, rows, false)
	asked, err := c.start(false, func(uint64) ([]*frame, error) {
		header := func() *pb.Header { return &pb.Header{Kind: pb.Kind_KIND_PULL, Group: e.group, Epoch: epoch} }
		return rowFrames(e, parts, header, func(f *frame, p *rowPart) {
			f.answers = max(f.answers, 0) + e.valueBytes()*p.count
		}), nil
	})
	if err != nil {
		return nil, nil, err
	}
	width, versions := e.width(), newVersions()
	gathered := make([]float32, len(distinct)*width)
	err = asked.read(ctx, func(p part, answer sliceAnswer, values []byte) {
		e.getValues(values, gathered[p.first:p.first+p.count])
		versions.note(p, answer)
	})
	if err != nil {
		return nil, nil, err
	}
	values := make([]float32, 0, len(rows)*width)
	for _, row := range rows {
		at, _ := slices.BinarySearch(distinct, row)
		values = append(values, gathered[at*width:(at+1)*width]...)
	}
	return values, versions, nil
}
